"""Compares calls with the definition as they happen, and keeps the worst of each operator and layer.

A comparison changes no result. What it finds is logged, and written as ``shadow-PID.json`` into the capture folder,
after every mismatch, now and then, and when the process ends.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isinf
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

from m3hal import ops
from m3hal.dispatch import Bound, M3halError
from m3hal.dispatch.watch import Watch
from m3hal_conformance import oracle
from m3hal_conformance.capture import case_of
from m3hal_conformance.compaction import Taken
from m3hal_conformance.compare import Score
from m3hal_conformance.harness import named
from m3hal_conformance.trial import Trial

logger = logging.getLogger("vllm.m3hal.shadow")
#: seconds between two writings of the report while nothing leaves its bound
INTERVAL = 10.0
#: mismatches of one operator and layer that are logged; the report counts them all
TOLD = 3


class Mismatch(M3halError):
    """A call left its bound, and the policy wants that to be an error."""


@dataclass
class Row:
    """What is known of one operator at one layer. first: which comparison of the process was its first mismatch.

    worst: error over bound, the largest; sentence: where. capture: file of the first mismatch, if it was kept.
    """

    layer: str
    operator: str
    backend: str
    impl_id: str
    compared: int = 0
    failed: int = 0
    worst: float = 0.0
    first: int | None = None
    sentence: str = ""
    capture: str = ""

    @property
    def place(self) -> str:
        """Operator, backend and layer, for sentences."""
        return f"{self.operator} of {self.backend} at {self.layer or 'its site'}"

    @property
    def by(self) -> str:
        """How far outside its bound it was at worst, for sentences."""
        return times(self.worst)

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity, which is what other bits than the right ones are worth: 1e308."""
        return {**asdict(self), "worst": min(self.worst, 1e308), "by": self.by}


def times(ratio: float) -> str:
    """``163 times the bound``; of outputs that are compared bit by bit there is no how far."""
    return "in bits that no bound covers" if isinf(ratio) else f"{ratio:.3g} times the bound"


@dataclass
class Ledger:
    """The comparisons of one process. calls: all of watched operators; skipped: chosen, and could not be compared."""

    folder: Path
    started: float = field(default_factory=time.time)
    rate: float = 1.0
    calls: int = 0
    compared: int = 0
    skipped: int = 0
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    _written: float = 0.0

    def __post_init__(self) -> None:
        # Engines end their processes without Python's atexit; multiprocessing's own finalizers do run.
        Finalize(None, self.close, exitpriority=10)

    @property
    def path(self) -> Path:
        return self.folder / f"shadow-{os.getpid()}.json"

    def row(self, bound: Bound, layer: str) -> Row:
        """The row of an operator's layer."""
        key = (layer, bound.operator)
        return self.rows.setdefault(key, Row(layer, bound.operator, bound.backend, bound.impl_id))

    @property
    def failed(self) -> list[Row]:
        """Rows with a mismatch, the earliest first."""
        return sorted((row for row in self.rows.values() if row.failed), key=lambda row: row.first or 0)

    def to_json(self) -> dict[str, Any]:
        """The report."""
        first = self.failed[0] if self.failed else None
        return {
            "version": 1,
            "pid": os.getpid(),
            "sample_rate": self.rate,
            "calls": self.calls,
            "compared": self.compared,
            "skipped": self.skipped,
            "first": None if first is None else {"layer": first.layer, "operator": first.operator},
            "rows": [row.to_json() for row in self.rows.values()],
        }

    def write(self) -> None:
        """Writes the report, for its owner's eyes; a folder that can't be written is a warning."""
        self._written = time.monotonic()
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
                file.write(json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            logger.warning("m3hal's report of shadowed calls can't be written: %s", error)

    def write_now_and_then(self) -> None:
        if time.monotonic() - self._written >= INTERVAL:
            self.write()

    def close(self) -> None:
        """The last report, and the summary in the log, also of nothing."""
        if self.compared:
            self.write()
        logger.warning("%s", self.summary())

    def summary(self) -> str:
        """A few lines: how much was compared, and what left its bound."""
        head = (
            f"m3hal compared {self.compared} of {self.calls} calls at sample_rate {self.rate:g} with their definitions"
        )
        if self.skipped:
            head += f", and could not compare {self.skipped}"
        if not self.compared:
            return f"{head}: nothing is known."
        head += "; "
        if not self.failed:
            worst = max(self.rows.values(), key=lambda row: row.worst)
            return (
                f"{head}none left its bound, the nearest was {worst.place} with {worst.worst:.2g} of it. "
                f"Report: {self.path}"
            )
        lines = [
            f"  {row.place}: {row.failed} of {row.compared} calls, at worst {row.by}"
            f"{f', {row.capture}' if row.capture else ''}"
            for row in self.failed
        ]
        return "\n".join([f"{head}these left their bound, the earliest first. Report: {self.path}", *lines])


def judge(bound: Bound, taken: Taken, live: Mapping[str, Any], returned: Any) -> list[Score]:
    """Scores of a call that has run. live: its arguments by name, mutated caches among them."""
    operator = ops.load(bound.operator)
    mutated = {name: live[name] for name in operator.mutates if live[name] is not None}
    actual = named(operator, returned, taken.after(mutated))
    trial = Trial(case_of(bound.operator, taken.site, taken.inputs), bound, torch.device("cpu"))
    trial.__dict__["exact"] = oracle.exact(operator, taken.site, taken.inputs)  # else kept by name; all have the same
    return trial.judge(actual)


def compare_call(
    ledger: Ledger, row: Row, bound: Bound, taken: Taken, live: Mapping[str, Any], returned: Any
) -> Score | None:
    """Enters one call into the ledger; the worst score when it left its bound."""
    scores = judge(bound, taken, live, returned)
    row.compared += 1
    ledger.compared += 1
    worst = max(scores, key=lambda score: score.ratio)
    failed = [score for score in scores if not score.passed]
    if worst.ratio > row.worst:
        row.worst, row.sentence = worst.ratio, str(worst)
    if not failed:
        ledger.write_now_and_then()
        return None
    if row.first is None:
        row.first = ledger.compared
    row.failed += 1
    return max(failed, key=lambda score: score.ratio)


def report(ledger: Ledger, row: Row, score: Score, watch: Watch, capture: str = "") -> None:
    """Logs and writes a mismatch. capture: the file of this very call, if it was kept.

    Raises Mismatch when the policy wants that.
    """
    ledger.write()
    sentence = f"{row.place} left its bound, {times(score.ratio)}: {str(score).rstrip('.')}."
    kept = f" The call is kept as {capture}." if capture else ""
    if watch.on_mismatch == "raise":
        raise Mismatch(f"{sentence}{kept} Override operators.{row.operator}, or set on_mismatch to 'warn'.")
    if row.failed <= TOLD:
        logger.warning("%s%s", sentence, kept)
