"""Whether a claim holds here, and what differs between two. No kernel runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3hal import ops
from m3hal._files import parsed
from m3hal.dispatch.errors import ConfigurationError, M3halError
from m3hal.dispatch.levels import digest
from m3hal_conformance.case import Case, case_set_hash
from m3hal_conformance.claim import CLAIM_VERSION, files_of, tiers
from m3hal_conformance.results import STATUSES, Result, counts
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import all_cases
from m3hal_conformance.trial import Unsupported

#: what a claim has at its top, and in each of its rows; what later versions of the suite add is no part of it
_PARTS: Mapping[str, type] = {
    "backend": str, "device": str, "environment": dict, "suite": dict, "seed": int, "executor": str,
    "implementations": dict, "counts": dict, "tiers": dict, "results": list, "digest": str,
}  # fmt: skip
#: cases of one line that are named
_SHOWN = 3
_ROW: Mapping[str, type] = {"case": str, "status": str, "failed": dict, "impl_id": str}


@dataclass(frozen=True)
class Finding:
    """What verification found about one part of a claim. state: ok, broken (tampered or stale), unknown."""

    state: str
    sentence: str


def read(path: str | Path) -> dict[str, Any]:
    """A claim from its file. Raises ConfigurationError with a sentence when it is none."""
    try:
        found = parsed(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read as a claim: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} can't be read as a claim: {error}.") from error
    if not isinstance(found, dict) or "claim_version" not in found:
        raise ConfigurationError(f"{path} is no claim; `m3hal conform --json FILE` writes one.")
    if found["claim_version"] != CLAIM_VERSION:
        told = f"{path} has claim version {found['claim_version']!r}; this suite reads {CLAIM_VERSION}"
        raise ConfigurationError(f"{told}. Verify it with the suite that wrote it.")
    problem = next(_misshapen(found), None)
    if problem:
        raise ConfigurationError(f"{path} is no whole claim: {problem}.")
    return found


def unedited(path: str | Path) -> dict[str, Any]:
    """A claim from its file; raises ConfigurationError also for one whose digest says that it was edited."""
    found = read(path)
    if digest(found) != found["digest"]:
        raise ConfigurationError(f"{path} was edited: its digest does not match. Use the file as it was written.")
    return found


def is_whole(claim: Mapping[str, Any]) -> bool:
    """Whether it has all that a claim has."""
    return next(_misshapen(claim), None) is None


def _misshapen(claim: Mapping[str, Any]) -> Iterator[str]:
    """What is missing, or of another kind than a claim has."""
    for name, kind in _PARTS.items():
        if not isinstance(claim.get(name), kind):
            yield f"its {name} is missing, or no {kind.__name__}"
    if not isinstance(claim["suite"].get("case_set"), str) or not isinstance(claim["suite"].get("whole"), bool):
        yield "its suite lacks case_set or whole"
    named = {"require": claim, "published_shape": claim, "whole_operators": claim["suite"]}
    for name, part in named.items():
        if not isinstance(part.get(name, []), list) or not all(isinstance(text, str) for text in part.get(name, [])):
            yield f"its {name} is no list of names"
    if not all(isinstance(text, str) for text in claim["environment"].values()):
        yield "its environment has a value that is no str"
    for number, row in enumerate(claim["results"]):
        if not isinstance(row, dict) or not all(isinstance(row.get(name), kind) for name, kind in _ROW.items()):
            yield f"row {number} of its results lacks one of {', '.join(_ROW)}"
        elif row["status"] not in STATUSES or "ratio" not in row or not _is_ratio(row["ratio"]):
            yield f"row {number} of its results has status {row['status']!r} and ratio {row.get('ratio')!r}"
    for operator, found in claim["implementations"].items():
        if not isinstance(found, dict) or not all(map(_is_described, found.values())):
            yield f"its implementations of {operator} do not name their case"


def _is_described(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("case"), str) and isinstance(value.get("path", ""), str)


def _is_ratio(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0)


def verify(claim: Mapping[str, Any]) -> list[Finding]:
    """Re-checks a claim that :func:`read` returned against itself, the installed suite and the installed backend."""
    same = digest(claim) == claim["digest"]
    edited = "it was edited: its digest does not match"
    cases = _verify_cases(claim)
    return [
        Finding("ok", "its digest covers what it says") if same else Finding("broken", edited),
        cases,
        _verify_statuses(claim, is_of_this_suite=cases.state == "ok"),
        *_verify_implementations(claim),
    ]


def _verify_cases(claim: Mapping[str, Any]) -> Finding:
    known = {case.id: case for case in all_cases()}
    asked = [known[row["case"]] for row in claim["results"] if row["case"] in known]
    if len(asked) < len(claim["results"]) or case_set_hash(asked) != claim["suite"]["case_set"]:
        return Finding("broken", f"stale: it ran case set {claim['suite']['case_set']}; these cases have changed since")
    if claim["suite"]["whole"] and len(asked) != len(known):
        return Finding("broken", f"stale: it ran {len(asked)} cases; the suite now has {len(known)}")
    return Finding("ok", f"its {len(asked)} cases are those of the installed suite")


def _verify_statuses(claim: Mapping[str, Any], *, is_of_this_suite: bool) -> Finding:
    """Counts follow from the rows alone; tiers also from which cases and operators there were, so from the suite."""
    results = [Result(row["case"], row["case"].partition("/")[0], "", row["status"]) for row in claim["results"]]
    for row in claim["results"]:
        if row["status"] == "pass" and (row["failed"] or (row["ratio"] or 0) > 1):
            return Finding("broken", f"{row['case']} is said to pass but a check of it failed")
        if row["impl_id"] and row["impl_id"] not in claim["implementations"].get(row["case"].partition("/")[0], {}):
            return Finding("broken", f"{row['case']} ran {row['impl_id']}, which is not among its implementations")
    if dict(counts(results)) != claim["counts"]:
        return Finding("broken", "its counts do not follow from its results")
    if not is_of_this_suite:
        return Finding("ok", "its counts follow from its results; its tiers are those of the suite that it ran")
    if tiers(results, claim.get("published_shape", ())) != claim["tiers"]:
        return Finding("broken", "its tiers do not follow from its results")
    return Finding("ok", "its counts and tiers follow from its results")


def _verify_implementations(claim: Mapping[str, Any]) -> Iterable[Finding]:
    runner = Runner(claim["backend"], claim["device"], require=tuple(claim.get("require", ())))
    cases = {case.id: case for case in all_cases()}
    for operator, found in claim["implementations"].items():
        for identity, described in found.items():
            try:
                case = cases.get(described["case"])
                if case is None or case.operator not in ops.NAMES:
                    raise Unsupported("the case that it was bound for is gone")
                yield _compared(f"{operator} {identity}", identity, described, *_installed(runner, case))
            except (Unsupported, M3halError) as error:
                yield Finding("unknown", f"{operator} {identity}: {str(error).splitlines()[0]}")


def _installed(runner: Runner, case: Case) -> tuple[str, Mapping[str, str] | None]:
    """The impl_id and the files of what would run a case. Nothing is bound, as the machine may lack its libraries."""
    made = runner.plan(case.operator, case.site, case.layout)
    choice = made.choice(case.operator, case.site.kind)
    if choice.chosen:
        return choice.chosen.impl_id, files_of(choice.chosen.impl)
    identity = made.impl_id(choice)
    return identity or runner.offer(case.operator, case.site, case.layout).bound.impl_id, None  # or it tells why none


def _compared(
    name: str, identity: str, described: Mapping[str, Any], now: str, files: Mapping[str, str] | None
) -> Finding:
    if now != identity:
        return Finding("broken", f"stale: {name} ran; installed is {now}")
    if files is not None and described.get("files") != files:
        return Finding("broken", f"{name}: the files that it lists are not those that make up this impl_id")
    return Finding("ok", f"{name}: the installed files are those that ran")


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What differs between two claims, as lines: what ran where, implementations, cases, errors that grew."""
    lines = [f"{name}: {before} -> {after}" for name, before, after in _facts(one, other) if before != after]
    for operator in sorted({*one["implementations"], *other["implementations"]}):
        before, after = (sorted(c["implementations"].get(operator, {})) for c in (one, other))
        if before != after:
            lines.append(f"{operator}: {', '.join(before) or 'absent'} -> {', '.join(after) or 'absent'}")
    rows = {row["case"]: row for row in one["results"]}
    for row in other["results"]:
        old = rows.pop(row["case"], None)
        if old is None:
            lines.append(f"{row['case']}: new, {row['status']}")
        elif old["status"] != row["status"]:
            lines.append(f"{row['case']}: {old['status']} -> {row['status']}")
        elif (row["ratio"] or 0) > 1.25 * (old["ratio"] or 0) + 0.01:
            lines.append(
                f"{row['case']}: its error over its bound grew from {old['ratio'] or 0:.3f} to {row['ratio']:.3f}"
            )
    return [*lines, *_gone(list(rows))]


def _gone(cases: list[str]) -> list[str]:
    """One line for cases that only the first claim has."""
    if not cases:
        return []
    rest = f" and {len(cases) - _SHOWN} more" if len(cases) > _SHOWN else ""
    count = f"{len(cases)} case{'s' * (len(cases) > 1)}"
    return [f"{count} no longer run: {', '.join(cases[:_SHOWN])}{rest}"]


def _facts(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value of one, value of the other) of who ran, where, and with which seed."""
    for name in ("backend", "distribution", "device", "seed", "executor", "threads", "require"):
        yield name, one.get(name), other.get(name)
    for part in ("environment", "suite", "tiers"):
        for name in sorted({*one[part], *other[part]}):
            yield f"{part} {name}", one[part].get(name), other[part].get(name)
