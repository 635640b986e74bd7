"""One call of ``moe_experts``: its tensors, parts of the workspace, and how it is tiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from m3hal_triton import _moe_weights as packing
from m3hal_triton._launch import is_hopper, programmatic
from m3hal_triton._moe_choice import WIDE, Choice, native
from m3hal_triton._moe_tuning import Tuning
from m3hal_triton._moe_weights import Packed
from m3hal_triton._workspace import Memory


@dataclass(frozen=True)
class Batch:
    """What the launches of a call share; those of a shared expert of its own have one of their own."""

    choice: Choice
    memory: Memory
    x: torch.Tensor
    ids: torch.Tensor
    given: torch.Tensor  # activations as the product takes them
    x_factor: torch.Tensor | None
    items: torch.Tensor | None
    total: torch.Tensor | None
    order: torch.Tensor | None
    positions: torch.Tensor
    hidden: torch.Tensor
    hidden_factor: torch.Tensor | None
    raw: torch.Tensor | None
    parts: torch.Tensor
    powers: torch.Tensor | None  # what tiles of parts in fp16 are multiplied by
    count: int  # work items at most
    format: str
    compute: tl.dtype
    slots: int
    shared: int  # number of the shared expert, which is each token's last; -1: it is none of these, or there is none
    tuning: Tuning
    splits: tuple[int, int]
    early: bool
    native: bool
    is_hopper: bool
    ready: torch.Tensor | None  # where w2's programs wait for their item alone: how much of it w13's have stored

    @property
    def lift(self) -> bool:
        """Whether hidden activations are fp16, lifted towards the end of its range."""
        return bool(self.compute == tl.float16)

    @property
    def raised(self) -> float:
        """What hidden activations are multiplied by."""
        return self.choice.lift if self.lift else 1.0


def given(choice: Choice, x: torch.Tensor, memory: Memory, *, has_wide: bool) -> torch.Tensor:
    """Where a product finds its activations."""
    if choice.rounds:
        return memory.take("x_codes", torch.float8_e4m3fn, len(x), -1)
    return memory.take("wide", torch.float16, len(x), -1) if has_wide else x


def batch_of(
    choice: Choice, x: torch.Tensor, ids: torch.Tensor, experts: Packed, memory: Memory, *, joined: bool
) -> Batch:
    """joined: the shared expert is one of the items'."""
    pairs, format = len(x) * (choice.slots + joined), packing.format_of_matrix(experts.w13, x)
    tuning, compute = choice.tuning(pairs), choice.compute(format)
    numbers, splits = memory.take("numbers", torch.int32, -1), choice.splits(pairs)
    has_wide, early = compute == tl.float16, programmatic(x.device)
    waits_for_one = early and splits[0] == 1 and tuning.tokens < WIDE and not choice.rounds
    return Batch(
        choice=choice,
        memory=memory,
        x=x,
        ids=ids,
        given=given(choice, x, memory, has_wide=has_wide),
        x_factor=memory.find("x_factor", torch.float32, -1) if has_wide or choice.rounds else None,
        items=memory.take("items", torch.int32, -1),
        total=numbers[-1:],
        order=memory.take("order", torch.int32, -1),
        positions=memory.take("positions", torch.int32, -1),
        hidden=memory.take("hidden", torch.float16 if has_wide else x.dtype, pairs, -1),
        hidden_factor=None,
        raw=memory.find("raw", torch.float32, splits[0], pairs, -1),
        parts=memory.take("parts", torch.float16 if choice.halves(pairs) else torch.float32, splits[1], pairs, -1),
        powers=memory.find("powers", torch.float32, pairs, -1),
        count=min(choice.experts + joined, pairs) + pairs // tuning.most,
        format=format,
        compute=compute,
        slots=choice.slots + joined,
        shared=choice.experts if joined else -1,
        tuning=tuning,
        splits=splits,
        early=early,
        native=native(x.device),
        is_hopper=is_hopper(x.device),
        ready=memory.take("ready", torch.int32, -1) if waits_for_one and not choice.site.lora_rank else None,
    )
