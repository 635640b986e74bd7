"""What became of a case: passed, failed, unsupported with a reason, or waived with an issue and an expiry."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from m3hal.dispatch.devices import kind
from m3hal.dispatch.errors import did_you_mean

Status = Literal["pass", "fail", "unsupported", "waived"]
STATUSES: tuple[Status, ...] = ("pass", "fail", "unsupported", "waived")
_KEYS = ("case", "check", "issue", "until", "device", "reason")
#: kinds of devices -> how their architectures begin
_ARCHITECTURES = {"cpu": "", "cuda": "sm_", "hip": "gfx", "hpu": "gaudi"}


@dataclass(frozen=True)
class CheckResult:
    """One check of one case. ratio: worst error over its bound, for checks that compare; sentence: of a failure."""

    name: str
    passed: bool
    ratio: float | None = None
    sentence: str = ""


@dataclass(frozen=True)
class Result:
    """One case. reason: why it is unsupported or waived. seconds: wall time. notes: what was measured and is no fault.

    sizes: tokens, requests, pages, context and experts of its inputs, where they have them.
    """

    case: str
    operator: str
    format: str
    status: Status
    checks: tuple[CheckResult, ...] = ()
    reason: str = ""
    impl_id: str = ""
    seconds: float = 0.0
    bugs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if not check.passed)

    @property
    def worst(self) -> float | None:
        """The largest error over its bound of any comparison; None when nothing was compared."""
        ratios = [check.ratio for check in self.checks if check.ratio is not None]
        return max(ratios) if ratios else None

    @property
    def faults(self) -> list[tuple[list[str], str]]:
        """What failed: the names of checks, and the sentence that they share."""
        found: dict[str, list[str]] = {}
        for check in self.failed:
            found.setdefault(check.sentence, []).append(check.name)
        return [(names, sentence) for sentence, names in found.items()]

    @property
    def sentence(self) -> str:
        """What there is to say about it, in one line."""
        if self.failed:
            return "; ".join(f"{', '.join(names)}: {sentence}" for names, sentence in self.faults)
        return self.reason


@dataclass(frozen=True)
class Waiver:
    """A failure that is known. case, check, device: patterns. until: the last day on which it holds."""

    case: str
    issue: str
    until: datetime.date
    check: str = "*"
    device: str = "*"
    reason: str = ""


class WaiverError(Exception):
    """A waiver file that can't be used, as a sentence."""


def read_waivers(path: str | Path, checks: Collection[str]) -> tuple[Waiver, ...]:
    """The waivers of a TOML file; :func:`concerning` picks those of a device.

        [[waiver]]
        case = "sparse_attention/needle/*"
        check = "rerun"                                   # all checks when left out
        issue = "https://github.com/acme/kernels/issues/7"
        until = 2027-01-31
        device = "cuda:sm_90"                             # all devices when left out

    checks: the names that exist. Raises WaiverError when the file can't be read, has another table or key, or a waiver
    has no issue, no expiry, or a check that doesn't exist.
    """
    try:
        tables = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise WaiverError(f"the waivers {path} can't be read: {error}.") from error
    for name in sorted(set(tables) - {"waiver"}):
        raise WaiverError(f"the waivers {path} have the unknown table {name!r}.{did_you_mean(name, ['waiver'])}")
    rows = tables.get("waiver", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WaiverError(f"each waiver of {path} must be a table [[waiver]], in double brackets.")
    return tuple(_waiver(row, f"waiver {number} of {path}", checks) for number, row in enumerate(rows, 1))


def _waiver(row: Mapping[str, Any], where: str, checks: Collection[str]) -> Waiver:
    for name in sorted(set(row) - set(_KEYS)):
        raise WaiverError(f"{where} has the unknown key {name!r}.{did_you_mean(name, _KEYS)}")
    for name in sorted(set(row) - {"until"}):
        if not isinstance(row[name], str):
            raise WaiverError(f"{where} has {name} = {row[name]!r}; write it in quotes.")
    if not row.get("case") or not str(row.get("issue", "")).startswith("http"):
        raise WaiverError(f"{where} must name its case and the address of its issue.")
    until = row.get("until")
    if not isinstance(until, datetime.date) or isinstance(until, datetime.datetime):
        raise WaiverError(f"{where} must say until when it holds, e.g. until = 2027-01-31.")
    check = row.get("check", "*")
    if not any(fnmatchcase(name, check) for name in checks):
        raise WaiverError(f"{where}: no check is called {check!r}.{did_you_mean(check, checks)}")
    return Waiver(**row)


def concerning(waivers: Sequence[Waiver], device: str) -> tuple[Waiver, ...]:
    """Those that hold on a device."""
    return tuple(waiver for waiver in waivers if fnmatchcase(device, waiver.device))


def nowhere(waivers: Sequence[Waiver], device: str) -> list[Waiver]:
    """Waivers of devices of which no kind that m3hal knows, and not ``device``'s, has one."""
    known = {kind(device): device.partition(":")[2], **_ARCHITECTURES}
    return [w for w in waivers if not any(_can_meet(w.device, *item) for item in known.items())]


def _can_meet(pattern: str, kind: str, begins: str) -> bool:
    """Whether a pattern can match ``kind:architecture`` where architectures begin so; without one it is ``kind``."""
    if not begins:
        return fnmatchcase(kind, pattern)
    literal = re.split(r"[*?\[]", pattern)[0]
    first = f"{kind}:{begins}"
    return first.startswith(literal) if literal != pattern and len(literal) < len(first) else literal.startswith(first)


def apply_waivers(results: Sequence[Result], waivers: Sequence[Waiver], today: datetime.date) -> list[Result]:
    """Results with waivers applied: a waived failure is ``waived``; a waived pass fails, and so does an expired waiver.

    A waiver that meets no case is reported on none; :func:`unused` names it.
    """
    return [_apply(result, waivers, today) for result in results]


def _apply(result: Result, waivers: Sequence[Waiver], today: datetime.date) -> Result:
    mine = [w for w in waivers if fnmatchcase(result.case, w.case)]
    if not mine or result.status == "unsupported":
        return result
    for waiver in mine:
        if waiver.until < today:
            note = f"the waiver of {waiver.issue} ended on {waiver.until}"
            return replace(result, status="fail", checks=(*result.checks, CheckResult("waiver", False, None, note)))
        hit = [check for check in result.failed if fnmatchcase(check.name, waiver.check)]
        if not hit:
            stands = _standing(result, waiver)
            note = f"{stands}, but {waiver.issue} waives it until {waiver.until}; take the waiver out"
            return replace(result, status="fail", checks=(*result.checks, CheckResult("waiver", False, None, note)))
    covered = all(any(fnmatchcase(check.name, w.check) for w in mine) for check in result.failed)
    if not covered:
        return result
    return replace(result, status="waived", reason=f"{mine[0].issue} until {mine[0].until}: {result.sentence}")


def _standing(result: Result, waiver: Waiver) -> str:
    """What a waiver that covers no failure of a case covers instead."""
    if not result.failed or waiver.check == "*":
        return "it passes"
    names = [check.name for check in result.checks if fnmatchcase(check.name, waiver.check)]
    if not names:
        return f"it is not asked the check {waiver.check!r}"
    return f"its check{'s' * (len(names) > 1)} {', '.join(names)} {'pass' if len(names) > 1 else 'passes'}"


def unused(waivers: Sequence[Waiver], results: Sequence[Result]) -> list[Waiver]:
    """Waivers whose pattern meets no case that ran."""
    return [w for w in waivers if not any(fnmatchcase(result.case, w.case) for result in results)]


def counts(results: Sequence[Result]) -> Mapping[str, int]:
    """Cases by status."""
    return {status: sum(result.status == status for result in results) for status in STATUSES}


def exit_code(results: Sequence[Result]) -> int:
    """0: nothing failed and something passed. 1: a case failed. 3: nothing could be run. (2 is a usage error.)"""
    if any(result.status == "fail" for result in results):
        return 1
    return 0 if any(result.status in ("pass", "waived") for result in results) else 3
