"""One HTML page about a run, no script and no network: what failed, by how much, which case, how to ask again."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from m3hal_conformance.bugs import BUGS
from m3hal_conformance.reports import facts, matrix, rerun
from m3hal_conformance.results import STATUSES, Result, counts

#: bytes that a page takes at most; reasons are cut until it does
LIMIT = 1 << 20
#: of failures: shown in full of each operator, checks of each, characters of a sentence
SHOWN, CHECKS, SENTENCE = 6, 4, 400
_TD = "td"
_MARKS = {"pass": "ok", "fail": "FAIL", "unsupported": "-", "waived": "waived"}
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:14px}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;"
    "text-align:left;vertical-align:top;overflow-wrap:break-word}.bad{color:#a40000}.good{color:#006b2d}"
    "code{background:#f2f2f2;padding:.1em .3em;overflow-wrap:anywhere}summary{cursor:pointer}"
    ".fail{border-left:4px solid #a40000;padding-left:1em;margin:1em 0}.fail ul{margin:.3em 0}"
)


def page(claim: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The page; no more than a megabyte."""
    made = ""
    for width in (200, 80, 0):
        made = _page(claim, results, width)
        if len(made.encode()) < LIMIT:
            break
    return made


def _page(claim: Mapping[str, Any], results: Sequence[Result], width: int) -> str:
    found = counts(results)
    failed = [result for result in results if result.status == "fail"]
    verdict = f"{len(failed)} of {len(results)} cases fail" if failed else f"Nothing fails in {len(results)} cases"
    parts = [
        f"<h1 class='{'bad' if failed else 'good'}'>{_e(verdict)}</h1>",
        f"<p>{_e(claim['backend'])} on {_e(claim['device'])}: "
        f"{', '.join(f'{found[s]} {s}' for s in STATUSES if found[s])}</p>",
        _failures(claim, failed),
        "<h2>By operator</h2>",
        _table(matrix(results)),
        "<h2>What ran</h2>",
        _table([[name, told] for name, told in facts(claim).items() if told], head=False),
        _implementations(claim),
        _notes(claim),
        "<h2>Every case</h2>",
        _cases(results, width),
    ]
    title = f"{verdict}: {claim['backend']} on {claim['device']}"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{_e(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _failures(claim: Mapping[str, Any], failed: Sequence[Result]) -> str:
    """By operator: how many, of which checks, the worst ones in full; the rest stands under every case."""
    count = Counter(result.operator for result in failed)
    links = [f"<a href='#{_e(name)}'>{_e(name)}</a> {number}" for name, number in count.items()]
    blocks = [f"<p class='bad'>failing: {', '.join(links)}</p>"] if failed else []
    for operator in count:
        mine = [result for result in failed if result.operator == operator]
        names = Counter(check.name for result in mine for check in result.failed)
        told = ", ".join(f"{name} {count}" for name, count in names.most_common())
        blocks.append(f"<h2 id='{_e(operator)}'>{_e(operator)}: {len(mine)} fail</h2><p>failed checks: {_e(told)}</p>")
        worst = sorted(mine, key=lambda result: -(result.worst or 0))
        blocks += [_failure(claim, result) for result in worst[:SHOWN]]
        if len(mine) > SHOWN:
            blocks.append(f"<p>and {len(mine) - SHOWN} more of {_e(operator)}, under Every case.</p>")
    return "".join(blocks)


def _failure(claim: Mapping[str, Any], result: Result) -> str:
    by = "" if result.worst is None else f", {result.worst:.3g} times its bound"
    bugs = f", reproduces {', '.join(map(_bug, result.bugs))}" if result.bugs else ""
    faults = [(", ".join(names), sentence) for names, sentence in result.faults]
    checks = [f"<li><b>{_e(names)}</b>: {_e(sentence[:SENTENCE])}</li>" for names, sentence in faults[:CHECKS]]
    if len(faults) > CHECKS:
        checks.append(f"<li>and {', '.join(_e(names) for names, _ in faults[CHECKS:])}</li>")
    return (
        f"<div class='fail'><b>{_e(result.case)}</b>{_e(by)}{bugs}<ul>{''.join(checks)}</ul>"
        f"<code>{_e(rerun(claim, result.case))}</code></div>"
    )


def _bug(name: str) -> str:
    """The number of a public bug, as a link to its report."""
    bug = BUGS.get(name)
    return f"<a href='{_e(bug.link)}' title='{_e(bug.what)}'>{_e(name)}</a>" if bug else _e(name)


def _implementations(claim: Mapping[str, Any]) -> str:
    """Operator, impl_id and factory, with the hash of each file folded away."""
    rows = [
        f"<tr><td>{_e(operator)}</td><td><code>{_e(identity)}</code></td><td>{_e(told.get('path', ''))}</td>"
        f"<td>{_files(told.get('files', {}))}</td></tr>"
        for operator, found in claim["implementations"].items()
        for identity, told in found.items()
    ]
    head = f"<tr>{_cells(('operator', 'impl_id', 'factory', 'files'), 'th')}</tr>"
    return f"<h2>Implementations</h2><table>{head}{''.join(rows)}</table>" if rows else ""


def _files(files: Mapping[str, str]) -> str:
    """Sixteen digits of each hash; the claim has them all."""
    if not files:
        return ""
    lines = "".join(f"<br>{_e(name)} <code>{_e(sha[:16])}</code>" for name, sha in files.items())
    return f"<details><summary>{len(files)}</summary>sha256{lines}</details>"


def _notes(claim: Mapping[str, Any]) -> str:
    notes = claim["coverage"].get("notes", [])
    items = "".join(f"<li>{_e(note)}</li>" for note in notes)
    return f"<h2>Coverage of what is declared</h2><ul>{items}</ul>" if notes else ""


def _cases(results: Sequence[Result], width: int) -> str:
    """A folded table per operator. width: characters of a reason."""
    blocks = []
    for operator in dict.fromkeys(result.operator for result in results):
        mine = [result for result in results if result.operator == operator]
        rows = [["case", "", "error / bound", "seconds", "reason, notes"], *(_row(result, width) for result in mine)]
        opened = " open" if len(results) < 20 else ""
        blocks.append(f"<details{opened}><summary>{_e(operator)}, {len(mine)} cases</summary>{_table(rows)}</details>")
    return "".join(blocks)


def _row(result: Result, width: int) -> list[str]:
    ratio = "" if result.worst is None else f"{result.worst:.3g}"
    told = "; ".join(filter(None, (result.sentence, *result.notes)))
    return [result.case, _MARKS[result.status], ratio, f"{result.seconds:.2f}", told[:width]]


def _table(rows: Sequence[Sequence[str]], head: bool = True) -> str:
    first = f"<tr>{_cells(rows[0], 'th' if head else 'td')}</tr>"
    return f"<table>{first}{''.join(f'<tr>{_cells(row, _TD)}</tr>' for row in rows[1:])}</table>"


def _cells(cells: Iterable[str], tag: str) -> str:
    return "".join(f"<{tag}>{_e(cell)}</{tag}>" for cell in cells)


def _e(text: str) -> str:
    return html.escape(text)
