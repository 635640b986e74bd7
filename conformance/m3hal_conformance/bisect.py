"""Finds the first operator of a running model that leaves its bound, and at which layer.

One pass of the model in vLLM compares every call of every layer with its definition on the call's own inputs
(mode ``shadow``), so that a fault is not blamed on what comes after it. A second pass confirms: with that one operator
from the reference, nothing more may leave its bound. A fault that no comparison sees (weights packed wrongly, bytes
written where nobody looked) shows in what the model says: then operators are swapped one after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from m3hal import ops
from m3hal.dispatch import M3halError, Plan, Policy
from m3hal_conformance.capture import replay

#: captures of one bisection, at most
CAPTURE_BYTES = 1 << 30
#: how far log-probabilities of the same tokens may be apart when every operator is right
LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """What to run. engine: more arguments of ``vllm.LLM``. folder: for captures, reports and logs."""

    model: str
    prompt: str
    steps: int
    policy: Policy
    plan: Plan
    engine: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class Run:
    """One engine's run. rows: what was compared, of all of its processes; empty unless it was shadowed."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    rows: tuple[Mapping[str, Any], ...]
    prompt_tokens: int

    @property
    def failed(self) -> tuple[Mapping[str, Any], ...]:
        """Rows with a mismatch, the earliest first."""
        return tuple(sorted((row for row in self.rows if row["failed"]), key=lambda row: row["first"]))


@dataclass(frozen=True)
class Finding:
    """What a bisection found. first: the row of the first mismatch; None when nothing left its bound.

    culprit: the operator, also when only swapping showed it. cleared: whether swapping it alone cleared the run.
    replayed: whether its capture fails again. others: rows that left their bounds later.
    """

    run: Run
    first: Mapping[str, Any] | None = None
    culprit: str = ""
    swapped: tuple[str, ...] = ()
    cleared: bool = False
    replayed: bool | None = None
    others: tuple[Mapping[str, Any], ...] = ()
    after: Run | None = None

    @property
    def backend(self) -> str:
        """Whom to ask the capture."""
        return str(self.first["backend"]).replace("+", ",") if self.first else ""


def bisect(question: Question, say: Say) -> Finding:
    """Two runs when something leaves its bound or the backend is the reference; at most one per operator more."""
    say(f"comparing every call of {question.policy.backend!r} with its definition")
    run = _run(question, "shadow", {}, say)
    say(f"{sum(row['compared'] for row in run.rows)} calls compared, {len(run.failed)} operators left their bound")
    if not run.failed:
        return _swap_each(question, run, say)
    first, *others = run.failed
    say(f"{first['operator']} at {first['layer']} did so first; again, with {first['operator']} from the reference")
    swapped = _swap(first["operator"])
    after = _run(question, "shadow", dict.fromkeys(swapped, "reference"), say)
    found = Finding(run, first, first["operator"], swapped, not after.failed, others=tuple(others), after=after)
    if not first["capture"]:
        return found
    say("asking the captured call again")
    device = question.plan.device
    return replace(found, replayed=replay(first["capture"], found.backend, device).status == "fail")


def _swap(operator: str) -> tuple[str, ...]:
    """What the reference must serve so that it serves this operator; it composes fused ones of their parts."""
    return (operator, *ops.load(operator).covers)


def _swap_each(question: Question, run: Run, say: Say) -> Finding:
    """Nothing left its bound: is what the model says what it says with the reference, and if not, whose fault is it."""
    plan = question.plan
    suspects = dict.fromkeys(row["operator"] for row in run.rows if row["backend"] != "reference")
    if not suspects:
        return Finding(run)
    say("what the model says with the reference alone")
    core = dict.fromkeys((name for name in ops.CORE if name not in _held(plan)), "reference")
    wanted = _run(question, "reference", core, say, watched=False)
    tolerance = LOGPROB_TOLERANCE.get(plan.shape.dtype, 0.25)
    if _apart(run, wanted) <= tolerance:
        return Finding(run, after=wanted)
    for operator in suspects:
        swapped = _swap(operator)
        say(f"the same with {operator} from the reference")
        after = _run(question, f"swap-{operator}", dict.fromkeys(swapped, "reference"), say, watched=False)
        if _apart(after, wanted) <= tolerance:
            return Finding(run, culprit=operator, swapped=swapped, cleared=True, after=after)
    return Finding(run, culprit="none alone", after=wanted)


def _held(plan: Plan) -> set[str]:
    return {choice.operator for choice in plan.choices if choice.engine}


def _apart(one: Run, other: Run) -> float:
    """The largest distance of log-probabilities up to the first token that differs, that one included."""
    worst = 0.0
    for a, b, p, q in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
        worst = max(worst, abs(p - q))
        if a != b:
            break
    return worst


def _run(question: Question, name: str, overrides: Mapping[str, str], say: Say, *, watched: bool = True) -> Run:
    """An engine in a process of its own, without this one's M3HAL_ variables. Raises M3halError when it ends badly."""
    folder = question.folder / (name if not overrides or not watched else f"{name}-confirm")
    folder.mkdir(parents=True)
    config = question.policy.to_json()
    config["operators"] = {**config.get("operators", {}), **overrides}
    if watched:
        config |= {"mode": "shadow", "sample_rate": 1, "capture_dir": str(folder), "capture_bytes": CAPTURE_BYTES}
    job = {"model": question.model, "prompt": question.prompt, "steps": question.steps, "config": config}
    (folder / "job.json").write_text(json.dumps({**job, "engine": dict(question.engine)}))
    command = [sys.executable, "-m", "m3hal.vllm.generate", str(folder / "job.json"), str(folder / "out.json")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("M3HAL_")}
    if question.engine.get("tensor_parallel_size", 1) == 1:
        environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    log = folder / "engine.log"
    with _process(command, environ, log) as process:
        _wait(process, log, say)
    if process.returncode or not (folder / "out.json").exists():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise M3halError(f"the engine ended with code {process.returncode}; its log is {log}, and ends\n{tail}")
    out = json.loads((folder / "out.json").read_text())
    reports = [json.loads(path.read_text())["rows"] for path in sorted(folder.glob("shadow-*.json"))]
    return Run(tuple(out["tokens"]), tuple(out["logprobs"]), _joined(reports), out["prompt_tokens"])


def _joined(reports: Iterable[Iterable[Mapping[str, Any]]]) -> tuple[Mapping[str, Any], ...]:
    """The rows of all ranks, those of one operator and layer as one: the earlier mismatch, with all calls counted."""
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for rows in reports for row in rows):
        key = (row["layer"], row["operator"])
        known = joined.get(key)
        if known is None:
            joined[key] = dict(row)
            continue
        front = min(known, row, key=lambda each: inf if each["first"] is None else each["first"])
        counts = {name: known[name] + row[name] for name in ("compared", "failed")}
        worst = max(known, row, key=lambda each: float(each["worst"]))
        joined[key] = {**worst, **{name: front[name] for name in ("first", "capture")}, **counts}
    return tuple(joined.values())


@contextmanager
def _process(command: list[str], environ: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Gone when this ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def _wait(process: subprocess.Popen[bytes], log: Path, say: Say) -> None:
    """Says every five seconds that something happens, and what."""
    told = time.monotonic()
    while process.poll() is None:
        if time.monotonic() - told > 5:
            told = time.monotonic()
            last = (log.read_text(errors="replace").split("\n") or [""])[-2:][0]
            say(f"  {last.rpartition('] ')[2].strip()[:90] or 'the engine starts'}")
        time.sleep(0.1)
