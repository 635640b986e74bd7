"""What people and machines read of a run: the terminal matrix and JUnit. The HTML page is :mod:`.page`."""

from __future__ import annotations

import shutil
import sys
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from m3hal_conformance.case import Case
from m3hal_conformance.results import STATUSES, Result, counts

#: failures that a terminal shows with their sentences, and cases of one sentence that are named beside the first
_BLOCKS, _NAMED = 20, 3


class Progress:
    """One line that moves on a terminal; elsewhere a line per tenth of the run."""

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self._total, self._stream, self._done, self._failed = total, stream, 0, 0
        self._moving = stream.isatty()

    def __call__(self, case: Case, result: Result) -> None:
        self._done += 1
        self._failed += result.status == "fail"
        width = shutil.get_terminal_size().columns - 1
        text = f"[{self._done}/{self._total}] {self._failed} failed  {case.id}"
        if self._moving:
            print(f"\r{text[:width]:<{width}}", end="", file=self._stream, flush=True)
            if self._done == self._total:
                print(f"\r{'':<{width}}\r", end="", file=self._stream, flush=True)
        elif self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            print(text, file=self._stream, flush=True)


def rerun(claim: Mapping[str, Any], case: str) -> str:
    """The command that asks one case again."""
    if case.endswith("/manifest"):
        return f"m3hal conform --backend {claim['backend']} --device {claim['device']}"
    seed = f" --seed {claim['seed']}" if claim["seed"] else ""
    required = "".join(f" --require {trait}" for trait in claim.get("require", ()))
    return f"m3hal conform --backend {claim['backend']} --device {claim['device']} --case {case}{seed}{required}"


def facts(claim: Mapping[str, Any]) -> dict[str, str]:
    """What ran, on what, in a few lines."""
    environment, suite = claim["environment"], claim["suite"]
    shown = ("m3hal", "torch", "python", "system", "device_label", "driver")
    libraries = [f"{name} {version}" for name, version in environment.items() if name not in shown]
    software = [f"m3hal {environment['m3hal']}", f"torch {environment['torch']}", f"Python {environment['python']}"]
    driver = f"driver {environment['driver']}" if environment["driver"] else ""
    executor = claim["executor"] + (f", CPU threads: {claim['threads']}" if "threads" in claim else "")
    implementations = [identity for found in claim["implementations"].values() for identity in found]
    required = ", ".join(claim.get("require", ()))
    return {
        "backend": f"{claim['backend']} ({claim['distribution']}), {len(implementations)} implementations"
        f"{f' that declare {required}' if required else ''}",
        "device": ", ".join(filter(None, (claim["device"], environment["device_label"], driver))),
        "software": ", ".join([*software, *libraries, environment["system"]]),
        "suite": f"{suite['version']}, case set {suite['case_set']}: {suite['cases']} cases"
        f"{'' if suite['whole'] else ', a part'}, seed {claim['seed']}",
        "executor": executor,
        "sizes": suite.get("sizes", ""),
        "largest inputs": _largest(claim.get("largest", {})),
        "tiers": ", ".join(tier for tier, held in claim["tiers"].items() if held) or "none",
    }


def _largest(found: Mapping[str, Mapping[str, int]]) -> str:
    """The largest of each size among all operators."""
    names = dict.fromkeys(name for mine in found.values() for name in mine)
    return ", ".join(f"{max(mine.get(name, 0) for mine in found.values()):,} {name}" for name in names)


def matrix(results: Sequence[Result]) -> list[list[str]]:
    """Rows of operator, counts by status, worst error over its bound, and what is unsupported or failed."""
    rows = [["operator", "pass", "fail", "unsupported", "waived", "worst error / bound", ""]]
    for operator in dict.fromkeys(result.operator for result in results):
        mine = [result for result in results if result.operator == operator]
        found = counts(mine)
        ratios = [r.worst for r in mine if r.worst is not None]
        rows.append(
            [operator, *(str(found[s] or ".") for s in STATUSES), f"{max(ratios):.3g}" if ratios else "", _note(mine)]
        )
    return rows


def _note(results: Sequence[Result]) -> str:
    failed = [r for r in results if r.status == "fail"]
    if failed:
        number = len({c.name for r in failed for c in r.failed})
        return f"{number} check{'s' * (number != 1)} failed"
    reasons = dict.fromkeys(r.reason for r in results if r.status == "unsupported")
    first = next(iter(reasons), "")
    return first + (f" (and {len(reasons) - 1} more reasons)" if len(reasons) > 1 else "")


def terminal(claim: Mapping[str, Any], results: Sequence[Result], *, selected: bool = False) -> str:
    """The matrix, the failures with the command that asks each again, the tiers, and on what it ran.

    selected: some operators or cases were asked for by name; what is said of the run is then left out.
    """
    rows = matrix(results)
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row[:6], widths, strict=True)) + "  " + row[6] for row in rows]
    alike = _alike(results)
    for first, *others in alike[:_BLOCKS]:
        lines += ["", f"FAIL {first.case}"]
        lines += [f"  {', '.join(names)}: {sentence}" for names, sentence in first.faults]
        lines += [f"  the same: {_few([result.case for result in others])}"] if others else []
        lines.append(f"  again: {rerun(claim, first.case)}")
    more = sum(map(len, alike[_BLOCKS:]))
    if more:
        lines += ["", f"and {more} more failed; --html FILE shows all."]
    found = counts(results)
    held = [tier for tier, ok in claim["tiers"].items() if ok]
    total = ", ".join(f"{found[s]} {s}" for s in STATUSES if found[s])
    lines += ["", f"{claim['backend']} on {claim['device']}: {total} of {len(results)} cases. "
              f"Tiers: {', '.join(held) or 'none'}."]  # fmt: skip
    if not selected:
        lines += [f"{name}: {told}" for name, told in facts(claim).items() if told and name not in ("backend", "tiers")]
    lines += [f"note: {note}" for note in claim["coverage"].get("notes", [])]
    return "\n".join(line.rstrip() for line in lines)


def _alike(results: Sequence[Result]) -> list[list[Result]]:
    """The failed ones; those that failed by the same checks with the same sentences together, as by one slip."""
    groups: dict[tuple[tuple[tuple[str, ...], str], ...], list[Result]] = {}
    for result in results:
        if result.status == "fail":
            groups.setdefault(tuple((tuple(names), told) for names, told in result.faults), []).append(result)
    return list(groups.values())


def _few(cases: Sequence[str]) -> str:
    rest = len(cases) - _NAMED
    return ", ".join(cases[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def junit(claim: Mapping[str, Any], results: Sequence[Result]) -> str:
    """JUnit XML: a suite per operator; unsupported and waived are skipped, with their reason."""
    root = xml.Element("testsuites", name=f"m3hal conformance of {claim['backend']}")
    for operator in dict.fromkeys(result.operator for result in results):
        mine = [result for result in results if result.operator == operator]
        found = counts(mine)
        suite = xml.SubElement(
            root, "testsuite", name=operator, tests=str(len(mine)), failures=str(found["fail"]), errors="0",
            skipped=str(found["unsupported"] + found["waived"]), time=f"{sum(r.seconds for r in mine):.3f}",
        )  # fmt: skip
        for result in mine:
            case = xml.SubElement(suite, "testcase", classname=operator, name=result.case, time=f"{result.seconds:.3f}")
            if result.status == "fail":
                names = ", ".join(check.name for check in result.failed)
                failure = xml.SubElement(case, "failure", message=names)
                failure.text = f"{result.sentence}\nagain: {rerun(claim, result.case)}"
            elif result.status != "pass":
                xml.SubElement(case, "skipped", message=f"{result.status}: {result.reason}")
    return xml.tostring(root, encoding="unicode", xml_declaration=True)
