"""How far implementations have been proved, computed from the claims that their packages ship.

A package keeps claims as ``claims/*.json`` beside its manifest. A claim counts for the ``impl_id`` that it names, so
one about files that have changed since counts for nothing, and so does one whose digest says that it was edited.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from m3hal.dispatch.discovery import Found
from m3hal.dispatch.identity import roots
from m3hal.dispatch.names import LEVELS

#: what a claim was made on -> what it proves
_EXECUTORS = {"double": "contract", "in-process": "hardware"}


def proved(backends: Iterable[Found], device: str) -> dict[str, str]:
    """impl_id -> level, for what the backends' own claims prove on a device. A contract holds on every device."""
    levels: dict[str, str] = {}
    for found in backends:
        for claim in _claims(found):
            level = _EXECUTORS.get(str(claim.get("executor")), LEVELS[0])
            if level == "hardware" and claim.get("device") != device:
                continue
            for identity in _passed(claim):
                levels[identity] = max(level, levels.get(identity, LEVELS[0]), key=LEVELS.index)
    return levels


def digest(claim: Mapping[str, Any]) -> str:
    """sha256 over everything but the digest itself."""
    text = json.dumps({k: v for k, v in claim.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _claims(found: Found) -> Iterator[Mapping[str, Any]]:
    package = found.target.partition(":")[0].partition(".")[0]
    for root in roots(package):
        for path in sorted((root / "claims").glob("*.json")) if root.is_dir() else ():
            status = path.stat()
            claim = _read(path, status.st_mtime_ns, status.st_size)
            if claim is not None:
                yield claim


@cache
def _read(path: Path, modified: int, size: int) -> Mapping[str, Any] | None:
    """A claim that is whole, else None: what a stray file says proves nothing."""
    try:
        claim = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return claim if isinstance(claim, dict) and digest(claim) == claim.get("digest") else None


def _passed(claim: Mapping[str, Any]) -> set[str]:
    """The implementations of which some case passed and none failed."""
    rows = [(row.get("impl_id"), row.get("status")) for row in claim.get("results", ())]
    failed = {identity for identity, status in rows if status not in ("pass", "unsupported")}
    return {identity for identity, status in rows if identity and status == "pass"} - failed
