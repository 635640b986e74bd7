"""The kill matrix: every wrong backend of the zoo is rejected by the check that it names, and hardly any by that alone.

What these tests run is the named check of each mutant and, for every third one, another cell that the committed matrix
knows; ``make test-all`` runs that for all of them. The whole matrix, every mutant in every case of its operator, is
``kill_matrix.json``, which ``test_whole_matrix`` measures anew.
"""

from collections import Counter
from pathlib import Path

import pytest
from m3hal_broken_zoo import MUTANTS, Mutant
from m3hal_broken_zoo.gaussian import passes
from m3hal_broken_zoo.kinds import KINDS
from m3hal_broken_zoo.matrix import COMMAND, cases_named, cells, committed, failed_checks, installed, measure, stale
from m3hal_conformance.bugs import BUGS
from m3hal_conformance.suite import select

from m3hal import ops

NAMES = [mutant.backend for mutant in MUTANTS]
MATRIX = committed()

#: mutants that one check of one case kills alone, each with the reason why there is no second
SINGLE: dict[str, str] = {
    "zoo-rms-norm-reads-a-number": "its numbers are right; only a compiler objects",
    "zoo-add-rms-norm-specialises": "its numbers are right; only a compiler objects",
    "zoo-swiglu-oai-hides-its-memory": "its numbers are right; only an allocator's record shows what it takes",
    "zoo-linear-keeps-every-result": "its numbers are right; only an allocator's record shows what it keeps",
}


def rejected_in(mutant: Mutant, cell: str) -> set[str]:
    """The formats in which a cell of the matrix rejects a mutant, whatever the page map."""
    with installed(mutant) as runner:
        return {case.format for case in cases_named(mutant, cell) if failed_checks(runner, case)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_named_check_kills(mutant):
    """The named check of the named case fails in every format in which the case is asked and the mutant is wrong."""
    formats = {case.format for case in cases_named(mutant, mutant.killed_by)} & set(mutant.formats)
    assert formats, f"{mutant.killed_by} names no case of {mutant.operator}"
    assert formats <= rejected_in(mutant, mutant.killed_by)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=m.backend, marks=[] if number % 3 == 0 else pytest.mark.slow)
        for number, m in enumerate(m for m in MUTANTS if m.backend not in SINGLE)
    ],
)
def test_another_check_kills(mutant):
    """A second check, or the same one in a case of another name, fails too: the zoo does not hang by single threads."""
    row = MATRIX["mutants"].get(mutant.backend)
    assert row, f"{mutant.backend} is not in the matrix; run {COMMAND} {mutant.operator}"
    check = mutant.killed_by.partition(":")[
        2
    ]  # the same one in another case first: it does not hang by what ran before
    others = cells(row["kills"]) - {mutant.killed_by}
    others = sorted(others, key=lambda cell: (not cell.endswith(f":{check}"), cell.startswith("tokens_4096"), cell))
    assert others, f"{mutant.killed_by} alone kills it: another case or check is needed, or a reason in SINGLE"
    assert any(rejected_in(mutant, cell) for cell in others[:3]), f"none of {others[:3]} does; run {COMMAND}"


def test_at_most_ten_by_a_single_check():
    """The exceptions are few, still exist, and are what the matrix says."""
    single = {name for name, row in MATRIX["mutants"].items() if len(cells(row["kills"])) == 1}
    assert len(SINGLE) <= 10
    assert single == set(SINGLE)


@pytest.mark.parametrize("operator", ops.NAMES)
def test_matrix_is_fresh(operator):
    """The committed matrix was measured with these mutants and with the cases that it names."""
    assert stale(MATRIX, operator) == [], f"run {COMMAND} {operator}"


@pytest.mark.slow
@pytest.mark.parametrize("operator", ops.NAMES)
def test_whole_matrix(operator):
    """Every mutant in every case of its operator: each dies by its name, and not by that alone."""
    mutants = [mutant for mutant in MUTANTS if mutant.operator == operator]
    found = measure(mutants, select(operators=[operator]))
    assert [m.backend for m in mutants if m.killed_by not in cells(found[m.backend])] == []
    assert {name for name, kills in found.items() if len(cells(kills)) < 2} <= set(SINGLE)


def test_enough_of_every_operator():
    """Each core operator has at least three mutants, each fused one that implementations may offer too."""
    count = Counter(mutant.operator for mutant in MUTANTS)
    assert {name for name in ops.NAMES if count[name] < 3} == set()


def test_every_operator_bug_has_a_mutant():
    """Each public bug of an operator, a layout or a format is also a wrong backend."""
    mine = {bug.id for bug in BUGS.values() if bug.where in ("case", "format")}
    assert mine - {mutant.bug for mutant in MUTANTS} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_has_a_mutant(kind):
    """The faults that any kernel may have are in the zoo."""
    have = {f"{mutant.operator} {mutant.name}" for mutant in MUTANTS}
    assert KINDS[kind]
    assert set(KINDS[kind]) - have == set()


def test_gaussian_inputs_miss_them():
    """At least 40 mutants stay within assert_close at 1e-2 on Gaussian inputs: that test would let them through."""
    assert sum(passes(mutant) for mutant in MUTANTS) >= 40


def test_each_mutant_says_what_it_does():
    """A mutant has a sentence and a name of its own."""
    assert all(mutant.sentence.endswith(".") for mutant in MUTANTS)
    assert len(set(NAMES)) == len(MUTANTS)
    assert (Path(__file__).parents[1] / "zoo" / "pyproject.toml").exists()
