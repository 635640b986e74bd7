"""What a kernel keeps from one call to the next: plans, packed weights, counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from m3hal.layouts import PagedCache
from m3hal_conformance.buckets import trimmed
from m3hal_conformance.checks import _same, check
from m3hal_conformance.harness import Named
from m3hal_conformance.trial import Trial

#: more than an eight-bit counter holds
MANY = 260


@check
def planned_once(trial: Trial) -> None:
    """One plan serves every layer of a forward, and packed weights every forward: a second launch gives the same."""
    *_, last = _launches(trial, 2)
    _same(trial.first.outputs, last, "launched again with the same plan and packed weights, it differs")


@check
def many_calls(trial: Trial) -> None:
    """Each of many launches gives the bits of the first: nothing wears out, fills up or overflows."""
    for number, outputs in enumerate(_launches(trial, MANY), 1):
        _same(trial.first.outputs, outputs, f"launch {number} in a row differs")


def _launches(trial: Trial, times: int) -> Iterator[Named]:
    """The outputs of each launch in a row, with the same plan, packed weights and memory."""
    carved = trial.carved(trial.inputs)
    arguments = trial.harness.arguments(carved)
    for _ in range(times):
        returned = trial.harness.launch(carved, arguments)
        outcome = trial.harness.outcome(carved, trial.given(trial.inputs), returned)
        yield trimmed(trial.operator, outcome, trial.inputs).outputs


@check
def huge_slots_read(trial: Trial) -> None:
    """Slots in pages past 31 bits of offset are read: the bits of the same pages close together."""
    cache: PagedCache = trial.inputs["cache"]
    slots, size = trial.inputs["slots"], trial.inputs["cache"].layout.page_size
    pages, where = (slots.clamp(min=0) // size).unique(return_inverse=True)
    near = {
        "cache": replace(cache, buf=cache.buf[pages].clone()),
        "slots": torch.where(slots < 0, slots, where * size + slots % size),
    }
    far = trial.call(trial.inputs).outputs
    _same(trial.call(near).outputs, far, "with pages past 31 bits of offset, the result differs")
