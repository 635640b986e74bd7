"""The kill matrix: every wrong backend of the zoo is rejected, by the check that it names, in every format."""

from collections import Counter
from pathlib import Path

import pytest
from m3hal_broken_zoo import MUTANTS
from m3hal_broken_zoo.gaussian import passes
from m3hal_broken_zoo.matrix import by_name, cases_for, kills, named_cases
from m3hal_conformance.bugs import BUGS

from m3hal import ops

ids = [mutant.backend for mutant in MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=ids)
def test_named_check_kills(mutant):
    """The named check of the named case fails in every format that the case is asked in."""
    cases = named_cases(mutant)
    formats = {case.format for case in cases}
    assert formats, f"{mutant.killed_by} names no case of {mutant.operator}"
    assert {kill.partition("-")[0] for kill in by_name(mutant, kills(mutant, cases))} == formats


@pytest.mark.slow
@pytest.mark.parametrize("operator", ops.NAMES)
def test_not_by_a_single_check(operator):
    """Hardly any mutant hangs by a single check of a single case: a cell of the matrix is ``case:check``."""
    mutants = [mutant for mutant in MUTANTS if mutant.operator == operator]
    single = []
    for mutant in mutants:
        found = kills(mutant, cases_for(mutant))
        assert found
        if len(found) == 1:
            single.append(mutant.backend)
    print(operator, len(mutants), "mutants; by one check only:", single)
    assert len(single) <= SINGLE.get(operator, 0), single


#: mutants that one check of one case kills alone, by operator: pages past 31 bits are asked about in bf16 only, and
#: rankings, whose scores are fp32 at every site, in one format
SINGLE: dict[str, int] = {
    "kv_write": 1,
    "block_scores": 1,
    "sparse_attention": 1,
    "paged_attention": 1,
    "quantize": 1,
    "merge_topk": 1,
    "topk_blocks": 1,
}


def test_at_most_ten_by_a_single_check():
    """The exceptions above are few."""
    assert sum(SINGLE.values()) <= 10


def test_enough_of_every_operator():
    """Each core operator has at least three mutants, each fused one too."""
    count = Counter(mutant.operator for mutant in MUTANTS)
    assert {name for name in ops.NAMES if count[name] < 3} == set()


def test_every_operator_bug_has_a_mutant():
    """Each public bug that a case reproduces is also a wrong backend."""
    missing = {bug.id for bug in BUGS.values() if bug.where == "case"} - {mutant.bug for mutant in MUTANTS}
    assert missing == set()


def test_gaussian_inputs_miss_them():
    """At least 40 mutants stay within assert_close at 1e-2 on Gaussian inputs: that test would let them through."""
    assert sum(passes(mutant) for mutant in MUTANTS) >= 40


def test_each_mutant_says_what_it_does():
    """A mutant has a sentence and a name of its own."""
    assert all(mutant.sentence.endswith(".") for mutant in MUTANTS)
    assert len({mutant.backend for mutant in MUTANTS}) == len(MUTANTS)
    assert (Path(__file__).parents[1] / "zoo" / "pyproject.toml").exists()
