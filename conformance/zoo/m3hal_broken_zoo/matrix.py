"""The kill matrix: which check of which case rejects which mutant.

``python -m m3hal_broken_zoo.matrix --write [operator ...]`` asks every mutant every case of its operator and writes the
result into ``kill_matrix.json``; twenty minutes on one core for all operators. Without ``--write`` it only prints.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from m3hal_conformance.case import Case, Rng, case_set_hash
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal import ops
from m3hal.dispatch import register, unregister
from m3hal.shape import Site
from m3hal_broken_zoo import MUTANTS, Mutant, optional, unseen

PATH = Path(__file__).with_name("kill_matrix.json")
COMMAND = "python -m m3hal_broken_zoo.matrix --write"
#: operators whose largest batch takes seconds
_LARGEST = dict.fromkeys(
    ("sparse_attention", "paged_attention", "block_scores", "select_blocks", "route_topk", "qk_norm_rope_insert"),
    ("tokens_4096",),
)
#: asked on devices that capture graphs
CAPTURED = ("no_host_sync", "graph_replay")
#: of one mutant: check -> names of the cases, without format and page map, in which it fails
Kills = dict[str, list[str]]


@contextmanager
def installed(mutant: Mutant) -> Iterator[Runner]:
    """A runner that meets the mutant as a backend of this process."""
    register(mutant.manifest())
    try:
        yield Runner(mutant.backend, "cpu")
    finally:
        unregister(mutant.backend)


@dataclass
class Kept:
    """A case's ``make`` whose inputs are drawn once and copied for each mutant, strides and sharing included."""

    make: Callable[[Rng, Site], dict[str, Any]]
    drawn: dict[tuple[int, int, str], dict[str, Any]] = field(default_factory=dict)

    def __call__(self, rng: Rng, site: Site) -> dict[str, Any]:
        key = (rng.generator.initial_seed(), rng.page_generator.initial_seed(), repr(rng.stale))
        if key not in self.drawn:
            self.drawn[key] = self.make(rng, site)
        return copy.deepcopy(self.drawn[key])


def failed_checks(runner: Runner, case: Case) -> set[str]:
    """The names of the checks of a case that the runner's mutant fails."""
    torch.manual_seed(0)
    result = runner.run_case(case)
    unsaid = "its limits do not mention" in result.reason  # mutants of what every site asks take nothing else
    if result.status == "unsupported" and case.checks != CAPTURED and not unsaid:
        print(f"{runner.backend}: {case.id} is unsupported: {result.reason}", file=sys.stderr)
    return {check.name for check in result.failed}


def name_of(case: Case) -> str:
    """A case without operator, format and page map."""
    return case.id.split("/")[1]


def family(case: Case) -> str:
    """How the names of dear cases like this one begin, which only mutants that name one are asked; "" for cheap ones.

    Compiling, a hundred calls and long contexts take seconds each; and a cache of gigabytes costs nothing only as long
    as nobody touches the whole of it.
    """
    long = ("context_64k", "context_140k", "context_1m", "prompt_1100", "batch_300")
    dear = ("beyond_31_bits", "compiled", "called_often", *long, *_LARGEST.get(case.operator, ()))
    return next((name for name in dear if name_of(case).startswith(name)), "")


def asks_more(case: Case) -> bool:
    """Whether the case's site asks what only some sites ask; elsewhere mutants of that are right."""
    return any(getattr(case.site, name) for name in ops.load(case.operator).optional)


def measure(mutants: Sequence[Mutant], cases: Sequence[Case]) -> dict[str, Kills]:
    """Every mutant in every case; oracles and inputs are made once per case, for all mutants.

    A cell has no format: it is asked in the first one in which the case exists and the mutant is wrong, and where the
    mutant names the case in all. Page maps are all asked.
    """
    formats: dict[str, dict[str, None]] = {}
    for case in cases:
        formats.setdefault(name_of(case), {})[case.format] = None
    found: dict[str, dict[str, dict[str, None]]] = {mutant.backend: {} for mutant in mutants}
    runners = {mutant.backend: Runner(mutant.backend, "cpu") for mutant in mutants}
    for case in cases:
        kept = case if case.lazy else replace(case, make=Kept(case.make))
        for mutant in mutants:
            if (dear := family(case)) and not mutant.killed_by.startswith(dear):
                continue
            if mutant.factory.__module__ in (optional.__name__, unseen.__name__) and not asks_more(case):
                continue
            first = next((f for f in formats[name_of(case)] if f in mutant.formats), "")
            if case.format != first and name_of(case) != mutant.killed_by.partition(":")[0]:
                continue
            register(mutant.manifest())
            try:
                for check in failed_checks(runners[mutant.backend], kept):
                    found[mutant.backend].setdefault(check, {})[name_of(case)] = None
            finally:
                unregister(mutant.backend)
    return {backend: {check: list(names) for check, names in sorted(kills.items())} for backend, kills in found.items()}


def cases_named(mutant: Mutant, cell: str) -> tuple[Case, ...]:
    """The cases of a cell ``case:check``, in every format and page map, with that check only."""
    name, _, check = cell.partition(":")
    return tuple(
        replace(case, checks=(check,))
        for case in select(ids=[f"{mutant.operator}/{name}"])
        if check in (*case.checks, "bind")
    )


def cells(kills: Kills) -> set[str]:
    """The cells ``case:check`` of a mutant's row."""
    return {f"{name}:{check}" for check, names in kills.items() for name in names}


def committed() -> dict[str, Any]:
    """The matrix as it was last measured."""
    found: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {"cases": {}, "mutants": {}}
    return found


def row_hash(mutant: Mutant) -> str:
    """12 hexadecimal digits over a mutant's source, the check that it names included."""
    return hashlib.sha256(inspect.getsource(mutant.factory).encode()).hexdigest()[:12]


def asked(cases: Sequence[Case]) -> dict[str, Any]:
    """What a part of the matrix was measured with."""
    return {"hash": case_set_hash(cases), "ids": [case.id.partition("/")[2] for case in cases]}


def changed_cases(matrix: Mapping[str, Any], operator: str) -> list[str]:
    """Which of the cases that an operator's part was measured with are not what they were, as sentences."""
    part = matrix["cases"].get(operator, {"hash": "", "ids": []})
    now = {case.id.partition("/")[2]: case for case in select(operators=[operator])}
    gone = [f"{operator}/{name} is gone" for name in part["ids"] if name not in now]
    if not gone and case_set_hash([now[name] for name in part["ids"]]) != part["hash"]:
        return [f"a case of {operator} asks something else"]
    return gone


def stale(matrix: Mapping[str, Any], operator: str) -> list[str]:
    """Why an operator's part of a matrix no longer holds, as sentences.

    Cases that were added since can only kill more, so they make nothing stale; the slow test measures with them.
    """
    found = changed_cases(matrix, operator)
    for mutant in MUTANTS:
        row = matrix["mutants"].get(mutant.backend)
        if mutant.operator == operator and (row is None or row["hash"] != row_hash(mutant)):
            found.append(f"{mutant.backend} is {'new' if row is None else 'another one'}")
    return found


def update(operator: str, *, only_stale: bool = False, also: Sequence[str] = ()) -> dict[str, Any]:
    """The committed matrix with an operator's part measured anew.

    only_stale: rows of mutants that are what they were stay, as long as the cases are; not those of ``also``.
    """
    mutants = [mutant for mutant in MUTANTS if mutant.operator == operator]
    old, start = committed(), time.perf_counter()
    known = {name: row for name, row in old["mutants"].items() if row["operator"] == operator}
    hashes = {mutant.backend: row_hash(mutant) for mutant in mutants}  # now: the files may change while this runs
    same = {b for b, found in hashes.items() if b not in also and known.get(b, {"hash": ""})["hash"] == found}
    keeps = only_stale and bool(same) and not changed_cases(old, operator)
    cases = select(operators=[operator])
    rows = measure([mutant for mutant in mutants if not (keeps and mutant.backend in same)], cases)
    _report(operator, rows, time.perf_counter() - start)
    matrix = committed()  # another process may have written meanwhile
    for name in known:
        matrix["mutants"].pop(name, None)
    for mutant in mutants:
        made = {"operator": operator, "hash": hashes[mutant.backend], "named": mutant.killed_by}
        fresh = rows.get(mutant.backend)
        matrix["mutants"][mutant.backend] = known[mutant.backend] if fresh is None else {**made, "kills": fresh}
    if not keeps:
        matrix["cases"][operator] = asked(cases)
    return {"command": COMMAND, "torch": torch.__version__, **{part: matrix[part] for part in ("cases", "mutants")}}


def _report(operator: str, rows: Mapping[str, Kills], seconds: float) -> None:
    print(f"{operator}: {len(rows)} mutants, {seconds:.0f} s", file=sys.stderr)
    for backend, kills in rows.items():
        named = next(mutant.killed_by for mutant in MUTANTS if mutant.backend == backend)
        found = cells(kills)
        note = "SURVIVES" if not found else "NOT KILLED BY ITS NAME" if named not in found else ""
        note = note or ("by one check only" if len(found) == 1 else "")
        print(
            f"  {backend:60} {named:40} {len(found):4} cells, {len(kills):2} checks  {note}",
            file=sys.stderr,
            flush=True,
        )


def main() -> None:
    """Measures the mutants of some operators, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", help="all when none is named")
    parser.add_argument("--write", action="store_true", help=f"into {PATH.name}")
    parser.add_argument("--stale", action="store_true", help="only what no longer holds")
    parser.add_argument("--also", action="append", default=[], help="with --stale: a backend whose row is made anew")
    options = parser.parse_args()
    for operator in options.operators or ops.NAMES:
        if options.stale and not options.also and not stale(committed(), operator):
            continue
        matrix = update(operator, only_stale=options.stale, also=options.also)
        if options.write:
            PATH.write_text(_text(matrix))


def _text(matrix: Mapping[str, Any]) -> str:
    """JSON with one mutant a line, so that a difference reads."""
    rows = {key: matrix[key] for key in ("command", "torch")}
    head = json.dumps(rows, indent=1)[:-2]
    parts = []
    for name in ("cases", "mutants"):
        lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(matrix[name].items()))
        parts.append(f' "{name}": {{\n{lines}\n }}')
    return head + ",\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
