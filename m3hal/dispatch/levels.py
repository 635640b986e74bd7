"""How far implementations have been proved, computed from the claims that their packages ship.

A package keeps claims as ``claims/*.json`` beside its manifest. A claim counts for the ``impl_id`` that it names, so
one about files that have changed since counts for nothing, and so does one whose digest says that it was edited. It
counts for the operators of which it asked every case, and no other claim outweighs a failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from m3hal._files import parsed
from m3hal.dispatch.discovery import Found
from m3hal.dispatch.identity import roots
from m3hal.dispatch.names import LEVELS
from m3hal.dispatch.screen import Candidate

#: what a claim was made on -> what it proves
_EXECUTORS = {"double": "contract", "in-process": "hardware"}


def proved(backends: Iterable[Found], device: str) -> dict[str, str]:
    """impl_id -> level, for what the backends' own claims prove on a device. A contract holds on every device."""
    levels: dict[str, str] = {}
    failed: set[str] = set()
    for found in backends:
        for claim in _claims(found):
            level = _EXECUTORS.get(str(claim.get("executor")), LEVELS[0])
            if level == "hardware" and claim.get("device") != device:
                continue
            failed |= _with_status(claim, lambda status: status not in ("pass", "unsupported"))
            for identity in _passed(claim):
                levels[identity] = max(level, levels.get(identity, LEVELS[0]), key=LEVELS.index)
    return {identity: level for identity, level in levels.items() if identity not in failed}


def with_stale(found: Found, candidates: Iterable[Candidate], device: str) -> list[Candidate]:
    """A backend's implementations, marked where claims beside it tell that the operator ran with other files."""
    candidates = list(candidates)
    if all(candidate.level != LEVELS[0] for candidate in candidates):
        return candidates
    installed = {candidate.impl_id for candidate in candidates}
    gone = {
        str(row.get("case")).partition("/")[0]
        for claim in _claims(found)
        if str(claim.get("executor")) == "double" or claim.get("device") == device
        for row in claim["results"]
        if isinstance(row, Mapping) and row.get("status") == "pass" and row.get("impl_id") not in installed
    }
    folder = next(_folders(found), Path())
    command = f"m3hal claim verify {folder}"
    return [replace(c, stale=command) if c.level == LEVELS[0] and c.operator in gone else c for c in candidates]


def shipped(backends: Iterable[Found]) -> list[Mapping[str, Any]]:
    """Every whole claim that lies beside a backend's manifest, once where backends share a package."""
    return list({str(claim["digest"]): claim for found in backends for claim in _claims(found)}.values())


def digest(claim: Mapping[str, Any]) -> str:
    """sha256 over everything but the digest itself."""
    text = json.dumps({k: v for k, v in claim.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _folders(found: Found) -> Iterator[Path]:
    """Where a backend's package keeps its claims."""
    package = found.target.partition(":")[0].partition(".")[0]
    yield from (root / "claims" for root in roots(package) if (root / "claims").is_dir())


def _claims(found: Found) -> Iterator[Mapping[str, Any]]:
    for folder in _folders(found):
        for path in sorted(folder.glob("*.json")):
            with contextlib.suppress(OSError):  # a link to nothing
                status = path.stat()
                claim = _read(path, status.st_mtime_ns, status.st_size)
                if claim is not None:
                    yield claim


@cache
def _read(path: Path, modified: int, size: int) -> Mapping[str, Any] | None:
    """A claim that is whole, else None: what a stray file says proves nothing."""
    try:
        claim = parsed(path.read_text(encoding="utf-8"))
        return claim if _is_claim(claim) and digest(claim) == claim.get("digest") else None
    except (OSError, ValueError, RecursionError):  # what can be read may be too deep to be written
        return None


def _is_claim(found: Any) -> bool:
    """Whether what is read from it here is of the types that a claim has."""
    if not isinstance(found, dict):
        return False
    suite, made = found.get("suite", {}), found.get("implementations", {})
    return (
        isinstance(found.get("results", []), list)
        and isinstance(suite, dict)
        and isinstance(suite.get("whole_operators", []), list)
        and isinstance(made, dict)
        and all(isinstance(ids, dict) for ids in made.values())
    )


def _passed(claim: Mapping[str, Any]) -> set[str]:
    """The implementations of which some case passed, of operators that were asked every case."""
    whole = claim.get("suite", {}).get("whole_operators", [])
    asked = {operator for operator in whole if isinstance(operator, str)}
    return _with_status(claim, lambda status: status == "pass", asked)


def _with_status(claim: Mapping[str, Any], fits: Callable[[Any], bool], operators: set[str] | None = None) -> set[str]:
    """The implementations that a row with such a status names; of some operators, or all."""
    rows = [row for row in claim.get("results", ()) if isinstance(row, Mapping)]
    return {
        row["impl_id"]
        for row in rows
        if fits(row.get("status"))
        and isinstance(row.get("impl_id"), str)
        and row["impl_id"]
        and (operators is None or str(row.get("case")).partition("/")[0] in operators)
    }
