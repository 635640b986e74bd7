"""``moe_experts``: each token's chosen experts, weighted and summed in fp32, and the expert that all tokens share.

:mod:`_moe_choice` says which way a call goes, :mod:`_moe_batch` what its launches share, :mod:`_moe_launch` and
:mod:`_moe_launch_few` launch; weights are packed by :mod:`_moe_weights`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.dispatch.manifest import Kernel
from m3hal.ops import ExpertLoRA, load
from m3hal.shape import Site
from m3hal_triton import _moe_launch as launch
from m3hal_triton import _moe_weights as packing
from m3hal_triton._moe_batch import Batch, batch_of, given
from m3hal_triton._moe_choice import Choice, is_packed, native, planned_for
from m3hal_triton._moe_launch_few import few_pairs, pairs_by_warps
from m3hal_triton._moe_tuning import BY_WARPS, FIXED, NARROW, Ladder, Warps, by_warps, ladder_of
from m3hal_triton._moe_weights import Packed
from m3hal_triton._workspace import Memory
from m3hal_triton.quantize import quantize_rows


def moe_experts(site: Site) -> Kernel:
    """The kernel for a site: tiles are chosen by the number of tokens."""
    is_nvidia = native(planned_for())
    ladder, warps = ladder_of(site, rounds=False, is_nvidia=is_nvidia), by_warps(site, is_nvidia=is_nvidia)
    return _kernel(site, ladder, warps=warps)


def batch_invariant(site: Site) -> Kernel:
    """The same, where a token has the same bits alone and in any batch: one tile for all, and no splits."""
    return _kernel(site, NARROW if site.dtype == "float32" else FIXED)


def fp8_activations(site: Site) -> Kernel:
    """FP8 weights times activations rounded to FP8, with a scale for each row: hidden ones by way of bf16."""
    return _kernel(site, ladder_of(site, rounds=True, is_nvidia=native(planned_for())), rounds=True)


def _kernel(site: Site, ladder: Ladder, *, rounds: bool = False, warps: tuple[Warps, Warps] | None = None) -> Kernel:
    choice = Choice(site, ladder, rounds, warps)
    return Kernel(
        run=_Run(choice),
        workspace_bytes=max(
            choice.room(tokens, joined).total
            for tokens in choice.largest_batches()
            for joined in {False, choice.joins(tokens)}
        ),
        prepare_weights=partial(packing.prepare, in_order=choice.in_order),
        update_weights=partial(packing.update, in_order=choice.in_order),
        unpack=packing.unpack,
    )


class _Run:
    """``run(x, weights, ids, experts, lora=None, out=None, workspace=None)``."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._fake = load("moe_experts").fake

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        experts: Packed,
        lora: ExpertLoRA | None = None,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result = self._fake(x, weights, ids, experts) if out is None else out
        if len(x) == 0:
            return result
        choice = self.choice
        if lora is not None and not choice.site.lora_rank:
            raise ValueError("this site says that it has no adapters (lora_rank 0); plan it with their rank")
        assert workspace is not None
        joined, batch = self._batch(x, ids, experts, workspace)
        if choice.is_few(len(x), joined):
            if choice.warps and not joined and len(batch.hidden) <= BY_WARPS:
                return pairs_by_warps(batch, experts, weights, result, choice.warps)
            return few_pairs(batch, experts, weights, result)
        launch.sort(batch)
        if choice.rounds:
            assert batch.x_factor is not None
            quantize_rows(x, batch.given, batch.x_factor, experts.x_scale)
        launch.up(batch, experts.w13, lora)
        if choice.rounds:
            batch = _rounded(batch, experts.hidden_scale)
        launch.down(batch, experts.w2)
        if lora is not None:
            launch.adapt(batch, lora, experts.w13.order, is_first=False)
        return launch.combine(batch, experts.w2, weights, None if joined else _shared(batch, experts.shared), result)

    def align(self, x: torch.Tensor, ids: torch.Tensor, experts: Packed, workspace: torch.Tensor) -> None:
        """The order of the experts alone, as a call begins with it, for who measures it; few tokens have none."""
        joined, batch = self._batch(x, ids, experts, workspace)
        if not self.choice.is_few(len(x), joined):
            launch.sort(batch)

    def _batch(
        self, x: torch.Tensor, ids: torch.Tensor, experts: Packed, workspace: torch.Tensor
    ) -> tuple[bool, Batch]:
        """And whether the shared expert is one of its items."""
        joined = experts.joined and self.choice.joins(len(x))
        memory = Memory(self.choice.room(len(x), joined), workspace)
        return joined, batch_of(self.choice, x, ids, experts, memory, joined=joined)


def _rounded(batch: Batch, scale: torch.Tensor | None) -> Batch:
    """With hidden activations in FP8, each row over a scale of its own, or all over the given one."""
    factor = batch.memory.take("hidden_factor", torch.float32, -1)
    codes = batch.memory.take("hidden_codes", torch.float8_e4m3fn, len(batch.hidden), -1)
    quantize_rows(batch.hidden, codes, factor, scale)
    return replace(batch, hidden=codes, hidden_factor=factor)


def _shared(batch: Batch, shared: Packed | None) -> torch.Tensor | None:
    """fp32 [T, H]: the output of a shared expert in launches of its own; None without one."""
    if shared is None:
        return None
    choice, memory, tokens = batch.choice, batch.memory, len(batch.x)
    format = packing.format_of_matrix(shared.w13, batch.x)
    compute = choice.compute(format)
    tuning = next(tuning for most, tuning in choice.shared_ladder if tokens <= most)
    has_wide = compute == tl.float16
    if has_wide and is_packed(format) != is_packed(choice.stored):
        launch.convert(batch, format)
    own = replace(
        batch,
        given=given(choice, batch.x, memory, has_wide=has_wide),
        x_factor=memory.find("x_factor", torch.float32, -1) if has_wide else None,
        items=None,
        total=None,
        ready=None,
        order=None,
        hidden=memory.take("shared_hidden", torch.float16 if has_wide else batch.x.dtype, tokens, -1),
        raw=None,
        parts=memory.take("shared_parts", torch.float32, 1, tokens, -1),
        powers=None,
        count=triton.cdiv(tokens, tuning.most),
        format=format,
        compute=compute,
        tuning=tuning,
        slots=1,
        shared=-1,
        splits=(1, 1),
    )
    launch.up(own, shared.w13)
    launch.down(own, shared.w2)
    return own.parts[0]
