"""Bound callables that watch their calls: a policy's mode ``record`` or ``shadow`` binds these, nothing else does.

What watching runs into (a full disk, an input it can't copy, a definition that raises) is logged once for each operator
and layer, and never reaches the model.
"""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.dispatch import Bound
from m3hal.dispatch.watch import Watch
from m3hal_conformance.capture import save, size_of
from m3hal_conformance.compaction import Taken, take
from m3hal_conformance.shadow import Ledger, Mismatch, compare_call, report

logger = logging.getLogger("vllm.m3hal.watch")

#: what plan_batch returned -> the SeqMeta that it was made from. Planned batches may be the same objects in every
#: forward, or new ones; a forward has a handful.
_PLANNED: OrderedDict[int, tuple[Any, ops.SeqMeta]] = OrderedDict()
_PLANNED_KEPT = 64


def watched(bound: Bound, watch: Watch, layer: str = "") -> Bound:
    """The same operator, its calls watched; as it is, with a warning, where its inputs can't be known."""
    _tell(watch)
    if bound.prepare_weights and not bound.unpack:
        _unwatchable(bound.operator, bound.backend)
        return bound
    if watch.mode == "shadow":
        ledger(watch.capture_dir).rate = watch.rate
    run = _Watcher(bound, watch, layer)
    planner = bound.plan_batch and _remembering(bound.plan_batch)
    return replace(bound, run=run, plan_batch=planner, traceable=False, unwatched=bound.unwatched or bound.run)


@cache
def _tell(watch: Watch) -> None:
    """Once a process."""
    step = _step(watch)
    share = "every call" if step == 1 else f"one call in {step}"
    if watch.max_bytes:
        logger.warning(
            "m3hal records %s in %s, up to %d bytes: the files hold user data, what requests said included.",
            share if watch.mode == "record" else "calls that leave their bound",
            watch.capture_dir,
            watch.max_bytes,
        )
    if watch.mode == "shadow":
        logger.warning(
            "m3hal compares %s of each layer with its definition, on the CPU and while the model waits.", share
        )


@cache
def _unwatchable(operator: str, backend: str) -> None:
    logger.warning("%s of %s packs its weights and can't unpack them: its calls are not watched.", operator, backend)


@cache
def ledger(folder: str) -> Ledger:
    """This process's ledger of a capture folder."""
    return Ledger(Path(folder))


@dataclass
class Shelf:
    """How much a capture folder holds. Other processes may write into it, so it is measured now and then."""

    folder: Path
    held: int = 0
    asked: int = 0

    def takes(self, size: int, limit: int) -> bool:
        """Whether so many more bytes fit; then they count as held."""
        if self.asked % 64 == 0:
            self.held = sum(file.stat().st_size for file in self.folder.glob("*.pt"))
        self.asked += 1
        fits = self.held + size <= limit
        self.held += size * fits
        return fits


@cache
def shelf(folder: str) -> Shelf:
    """This process's view of a capture folder."""
    return Shelf(Path(folder))


def _remembering(plan_batch: Callable[[Any, Tensor | None], Any]) -> Callable[[Any, Tensor | None], Any]:
    def planned(meta: ops.SeqMeta, storage: Tensor | None) -> Any:
        found = plan_batch(meta, storage)
        _PLANNED[id(found)] = (found, meta)
        _PLANNED.move_to_end(id(found))
        if len(_PLANNED) > _PLANNED_KEPT:
            _PLANNED.popitem(last=False)
        return found

    return planned


@dataclass(eq=False)
class _Watcher:
    """The callable of one layer. Of every ``step`` calls it watches one; layers take turns."""

    bound: Bound
    watch: Watch
    layer: str
    _calls: int = 0
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._step = _step(self.watch)
        self._calls = zlib.crc32(f"{self.bound.operator} {self.layer}".encode()) % self._step
        self._operator = ops.load(self.bound.operator)
        self._book = ledger(self.watch.capture_dir) if self.watch.mode == "shadow" else None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        self._calls += 1
        if self._book:
            self._book.calls += 1
        if self._calls % self._step or _is_capturing():
            return self.bound.run(*inputs, **options)
        taken = self._safely(self._take, inputs)
        returned = self.bound.run(*inputs, **options)
        if taken is not None:
            self._safely(self._record if self.watch.mode == "record" else self._compare, taken, inputs, returned)
        return returned

    def _take(self, inputs: tuple[Any, ...]) -> Taken:
        named = zip(self._operator.inputs, inputs, strict=False)
        return take(self.bound.site, {name: self._original(name, value) for name, value in named})

    def _original(self, name: str, value: Any) -> Any:
        """What the operator's definition takes, in place of what an implementation made of it."""
        if id(value) in _PLANNED and _PLANNED[id(value)][0] is value:
            return _PLANNED[id(value)][1]
        if name == "experts" and self.bound.prepare_weights and self.bound.unpack:
            return self.bound.unpack(value)
        return value

    def _record(self, taken: Taken, *_: Any) -> None:
        self._keep(taken)

    def _compare(self, taken: Taken, inputs: tuple[Any, ...], returned: Any) -> None:
        book = ledger(self.watch.capture_dir)
        row = book.row(self.bound, self.layer)
        live = dict(zip(self._operator.inputs, inputs, strict=False))
        score = compare_call(book, row, self.bound, taken, live, returned)
        if score is not None:
            kept = "" if row.capture else self._keep(taken)
            row.capture = row.capture or kept
            report(book, row, score, self.watch, kept)

    def _keep(self, taken: Taken) -> str:
        """Writes a capture unless the folder would grow beyond its cap; the path, or nothing."""
        folder = Path(self.watch.capture_dir)
        if not shelf(self.watch.capture_dir).takes(size_of(taken.inputs), self.watch.max_bytes):
            if self.watch.max_bytes:
                self._once(f"{folder} holds its {self.watch.max_bytes} bytes: no more calls of this size are recorded")
            return ""
        name = "-".join(filter(None, [self.bound.operator, self.layer.replace("/", "_")]))
        origin = {"layer": self.layer, "backend": self.bound.backend, "impl_id": self.bound.impl_id}
        return str(save(folder, name, self.bound.operator, taken.site, taken.inputs, **origin))

    def _safely(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Mismatch:
            raise
        except Exception as error:
            self._once(f"a call can't be watched: {type(error).__name__}: {error}")
            if self._book:
                self._book.skipped += 1
            return None

    def _once(self, sentence: str) -> None:
        if sentence not in self._told and len(self._told) < 8:
            self._told.add(sentence)
            logger.warning("%s of %s at %s: %s.", self.bound.operator, self.bound.backend, self.layer, sentence)


def _step(watch: Watch) -> int:
    return max(1, round(1 / watch.rate))


def _is_capturing() -> bool:
    """Nothing may be copied to the host while a CUDA graph is captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
