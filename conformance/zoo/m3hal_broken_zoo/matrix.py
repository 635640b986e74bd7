"""The kill matrix: which check of which case rejects which mutant. ``python -m m3hal_broken_zoo.matrix`` prints it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from m3hal_conformance.case import Case
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal.dispatch import register, unregister
from m3hal_broken_zoo import MUTANTS, Mutant


@contextmanager
def installed(mutant: Mutant) -> Iterator[Runner]:
    """A runner that meets the mutant as a backend of this process."""
    register(mutant.manifest())
    try:
        yield Runner(mutant.backend, "cpu")
    finally:
        unregister(mutant.backend)


def kills(mutant: Mutant, cases: Iterable[Case]) -> set[str]:
    """``case:check`` of every check that the mutant fails; the case with its format."""
    torch.manual_seed(0)
    found = set()
    with installed(mutant) as runner:
        for case in cases:
            result = runner.run_case(case)
            assert result.status in ("pass", "fail"), f"{mutant.backend}: {case.id} is {result.status}: {result.reason}"
            found |= {f"{case.id.partition('/')[2]}:{check.name}" for check in result.failed}
    return found


def named_cases(mutant: Mutant) -> tuple[Case, ...]:
    """The cases that the mutant's ``killed_by`` names, in every format and layout."""
    return select(ids=[f"{mutant.operator}/{mutant.killed_by.partition(':')[0]}"])


def cases_for(mutant: Mutant) -> tuple[Case, ...]:
    """The small cases of the mutant's operator, and the one it names."""
    return tuple(dict.fromkeys((*named_cases(mutant), *select(operators=[mutant.operator], quick=True))))


def by_name(mutant: Mutant, found: Iterable[str]) -> set[str]:
    """The formats in which the named check of the named case killed it."""
    case, _, check = mutant.killed_by.partition(":")
    return {
        kill.split("/")[1].split(":")[0] for kill in found if kill.startswith(f"{case}/") and kill.endswith(f":{check}")
    }


def main() -> None:
    """Every mutant of some operators against every case of its operator, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--named", action="store_true", help="only the case that each mutant names")
    options = parser.parse_args()
    table = {}
    for mutant in MUTANTS:
        if options.operators and mutant.operator not in options.operators:
            continue
        cases = named_cases(mutant) if options.named else cases_for(mutant)
        found = kills(mutant, cases)
        named = by_name(mutant, found)
        formats = {case.format + ("-nhd" if case.layout == "nhd" else "") for case in named_cases(mutant)}
        note = "" if named else "  NOT KILLED BY ITS NAME" if found else "  SURVIVES"
        missing = sorted(formats - named)
        print(
            f"{mutant.backend:60} {mutant.killed_by:40} kills {len(found):3} missing {missing}{note}",
            file=sys.stderr,
            flush=True,
        )
        table[mutant.backend] = sorted(found)
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
