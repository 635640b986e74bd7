"""``m3hal claim``: verdicts on files of claims, what differs between two, and what several prove together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from m3hal import ops
from m3hal.cli.output import emit
from m3hal.dispatch import levels
from m3hal.dispatch.discovery import discover
from m3hal.dispatch.errors import ConfigurationError, did_you_mean
from m3hal_conformance import support_page
from m3hal_conformance.support import support
from m3hal_conformance.verification import Finding, compare, is_whole, read, unedited, verify

#: states from best to worst, each with its exit code; a refused file leaves unknown what it claims at all
_CODES = {"ok": 0, "unknown": 3, "broken": 1, "refused": 2}


@dataclass(frozen=True)
class Verdict:
    """What verification found about a file; ``refused`` is no claim of this suite's version, with one finding."""

    file: str
    findings: tuple[Finding, ...]

    @property
    def state(self) -> str:
        return max((finding.state for finding in self.findings), key=list(_CODES).index)

    @property
    def line(self) -> str:
        """The file's state, and the first of the findings that say why."""
        why = [finding.sentence for finding in self.findings if finding.state == self.state]
        told = "it holds here" if self.state == "ok" else why[0]
        rest = f" (and {len(why) - 1} more)" if self.state != "ok" and len(why) > 1 else ""
        return f"{self.state:8}{self.file}: {told}{rest}"


def claims(options: argparse.Namespace) -> int:
    """``m3hal claim ACTION FILE...``. The exit codes are those that the command line's own file promises."""
    if options.action == "matrix":
        return _matrix(options)
    if options.action == "compare":
        lines = compare(read(options.files[0]), read(options.files[1]))
        emit(options, {"differences": lines}, "\n".join(lines) or "Both say the same.")
        return 1 if lines else 0
    named = files(options.files)
    if len(named) == 1 and named == options.files:
        verdicts = [Verdict(named[0], tuple(verify(read(named[0]))))]
        text = "\n".join(f"{finding.state:8}{finding.sentence}" for finding in verdicts[0].findings)
    else:
        verdicts = [_verdict(name) for name in named]
        text = "\n".join(verdict.line for verdict in verdicts)
    data = [{"file": v.file, "state": v.state, "findings": [vars(f) for f in v.findings]} for v in verdicts]
    emit(options, {"claims": data}, text)
    return _CODES[max((verdict.state for verdict in verdicts), key=list(_CODES).index)]


def _matrix(options: argparse.Namespace) -> int:
    """What the claims of installed backends and of the files prove, and of which backends they say nothing."""
    for name in options.op:
        if name not in ops.NAMES:
            raise ConfigurationError(f"{name!r} is no operator.{did_you_mean(name, ops.NAMES)}")
    backends = discover()
    shipped = filter(is_whole, levels.shipped(backends))
    found = support(backends, [*shipped, *map(unedited, files(options.files))])
    known = list(dict.fromkeys(cell.device for cell in found.cells))
    for name in options.device:
        if name not in known:
            raise ConfigurationError(f"no claim and no backend is about {name!r}; they are about {', '.join(known)}.")
    told = {cell.backend for cell in found.cells}
    silent = [backend.name for backend in backends if backend.is_usable and backend.name not in told]
    picked = support_page.picked(found, options.device, options.op)
    text = support_page.terminal(picked)
    if silent:
        text += (
            f"\n\nNot in these tables: {', '.join(silent)}, of which no claim is installed or named. Name files or "
            "folders to count theirs, too; m3hal's own, of the reference, are in docs/claims of its repository."
        )
    emit(options, {**picked.to_json(), "without_claims": silent}, text)
    return 0


def files(named: Sequence[str]) -> list[str]:
    """The files, and in place of a folder its ``*.json``, each once. Raises ConfigurationError for a folder without."""
    found: list[str] = []
    for name in named:
        inside = sorted(map(str, Path(name).glob("*.json"))) if os.path.isdir(name) else [name]
        if not inside:
            raise ConfigurationError(f"the folder {name} holds no claim: there is no *.json in it.")
        found += inside
    return list(dict.fromkeys(found))


def _verdict(name: str) -> Verdict:
    try:
        return Verdict(name, tuple(verify(read(name))))
    except ConfigurationError as error:
        return Verdict(name, (Finding("refused", str(error).removeprefix(f"{name} ")),))
