"""What people and machines read of a run: the terminal matrix, JUnit, one self-contained HTML page."""

from __future__ import annotations

import html
import shutil
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from m3hal_conformance.case import Case
from m3hal_conformance.results import STATUSES, Result, counts

_TD = "td"
_MARKS = {"pass": "ok", "fail": "FAIL", "unsupported": "-", "waived": "waived"}


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
    seed = f" --seed {claim['seed']}" if claim["seed"] else ""
    return f"m3hal conform --backend {claim['backend']} --device {claim['device']} --case {case}{seed}"


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


def terminal(claim: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The matrix, the failures with the command that asks each again, and the tiers."""
    rows = matrix(results)
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row[:6], widths, strict=True)) + "  " + row[6] for row in rows]
    failed = [r for r in results if r.status == "fail"]
    for result in failed[:20]:
        lines += ["", f"FAIL {result.case}"]
        lines += [f"  {check.name}: {check.sentence}" for check in result.failed]
        lines.append(f"  again: {rerun(claim, result.case)}")
    if len(failed) > 20:
        lines += ["", f"and {len(failed) - 20} more failed; --html FILE shows all."]
    found = counts(results)
    held = [tier for tier, ok in claim["tiers"].items() if ok]
    total = ", ".join(f"{found[s]} {s}" for s in STATUSES if found[s])
    lines += ["", f"{claim['backend']} on {claim['device']}: {total} of {len(results)} cases. "
              f"Tiers: {', '.join(held) or 'none'}."]  # fmt: skip
    lines += [f"note: {note}" for note in claim["coverage"].get("notes", [])]
    return "\n".join(line.rstrip() for line in lines)


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


def page(claim: Mapping[str, Any], results: Sequence[Result]) -> str:
    """One HTML page, no script and no network: what failed, by how much, which case, how to ask again."""
    found = counts(results)
    failed = [result for result in results if result.status == "fail"]
    verdict = f"{len(failed)} of {len(results)} cases fail" if failed else f"Nothing fails in {len(results)} cases"
    facts = {
        "backend": f"{claim['backend']} ({claim['distribution']})",
        "device": f"{claim['device']} {claim['environment']['device_label']} {claim['environment']['driver']}",
        "software": f"m3hal {claim['environment']['m3hal']}, suite {claim['suite']['version']}, "
        f"torch {claim['environment']['torch']}, Python {claim['environment']['python']}",
        "case set": f"{claim['suite']['case_set']}, {claim['suite']['cases']} cases, seed {claim['seed']}",
        "tiers": ", ".join(t for t, ok in claim["tiers"].items() if ok) or "none",
    }
    parts = [
        f"<h1 class='{'bad' if failed else 'good'}'>{_e(verdict)}</h1>",
        f"<p>{', '.join(f'{found[s]} {s}' for s in STATUSES)}</p>",
        _failures(claim, failed),
        "<h2>By operator</h2>",
        _table(matrix(results)),
        "<h2>What ran</h2>",
        _table([[k, v] for k, v in facts.items()], head=False),
        _notes(claim),
        "<h2>Every case</h2>",
        _cases(results),
    ]
    style = (
        "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222}"
        "table{border-collapse:collapse;font-size:14px}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;"
        "text-align:left;vertical-align:top}.bad{color:#a40000}.good{color:#006b2d}"
        "code{background:#f2f2f2;padding:.1em .3em;"
        "overflow-wrap:anywhere}.fail{border-left:4px solid #a40000;padding-left:1em;margin:1.2em 0}"
    )
    title = f"{verdict}: {claim['backend']} on {claim['device']}"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{_e(title)}</title><style>{style}</style></head><body>{''.join(parts)}</body></html>"
    )


def _failures(claim: Mapping[str, Any], failed: Sequence[Result]) -> str:
    blocks = []
    for result in failed[:100]:
        by = "" if result.worst is None else f", {result.worst:.3g} times its bound"
        checks = "".join(f"<li><b>{_e(c.name)}</b>: {_e(c.sentence[:600])}</li>" for c in result.failed)
        bugs = f" reproduces {', '.join(result.bugs)}" if result.bugs else ""
        blocks.append(
            f"<div class='fail'><b>{_e(result.case)}</b>{_e(by)}{_e(bugs)}<ul>{checks}</ul>"
            f"<code>{_e(rerun(claim, result.case))}</code></div>"
        )
    more = f"<p>and {len(failed) - 100} more, below.</p>" if len(failed) > 100 else ""
    return "".join(blocks) + more


def _notes(claim: Mapping[str, Any]) -> str:
    notes = claim["coverage"].get("notes", [])
    return (
        f"<h2>Coverage of what is declared</h2><ul>{''.join(f'<li>{_e(n)}</li>' for n in notes)}</ul>" if notes else ""
    )


def _cases(results: Sequence[Result]) -> str:
    blocks = []
    for operator in dict.fromkeys(result.operator for result in results):
        mine = [result for result in results if result.operator == operator]
        rows = [["case", "", "error / bound", "seconds", "reason"]] + [
            [
                r.case,
                _MARKS[r.status],
                "" if r.worst is None else f"{r.worst:.3g}",
                f"{r.seconds:.2f}",
                r.sentence[:200],
            ]
            for r in mine
        ]
        blocks.append(f"<details><summary>{_e(operator)}, {len(mine)} cases</summary>{_table(rows)}</details>")
    return "".join(blocks)


def _table(rows: Sequence[Sequence[str]], head: bool = True) -> str:
    first = f"<tr>{_cells(rows[0], 'th')}</tr>" if head else f"<tr>{_cells(rows[0], 'td')}</tr>"
    return f"<table>{first}{''.join(f'<tr>{_cells(row, _TD)}</tr>' for row in rows[1:])}</table>"


def _cells(cells: Iterable[str], tag: str) -> str:
    return "".join(f"<{tag}>{_e(cell)}</{tag}>" for cell in cells)


def _e(text: str) -> str:
    return html.escape(text)
