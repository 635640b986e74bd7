"""Launches of ``moe_experts`` where programs find their items themselves: two kernels a call, or three."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton

from m3hal_triton import _moe_few as few
from m3hal_triton import _moe_one as one
from m3hal_triton._launch import after, power_of_two_above
from m3hal_triton._moe_batch import Batch
from m3hal_triton._moe_choice import is_packed
from m3hal_triton._moe_launch import common
from m3hal_triton._moe_tuning import Warps
from m3hal_triton._moe_weights import Packed


def few_pairs(batch: Batch, experts: Packed, weights: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Up to few.PAIRS pairs of a token and an expert."""
    site, x, ids, w13, w2 = batch.choice.site, batch.x, batch.ids, experts.w13, experts.w2
    tuning, (pairs, inner), converts = batch.tuning, batch.hidden.shape, batch.choice.converts
    if converts:
        _convert(batch, in_order=False)
    same = {"SLOTS": batch.slots, "SHARED": batch.shared}
    parts, slots = batch.choice.parts(pairs, tuning.up, w13), power_of_two_above(batch.slots)
    few.up[(pairs * triton.cdiv(w13.rows * parts, tuning.up.rows),)](
        batch.given, batch.given.stride(), batch.x_factor, w13.arguments(), ids, ids.stride(), batch.hidden,
        w13.size, batch.given.shape[1], inner, (site.alpha, site.beta, site.limit), RAISE=batch.raised,
        FIRST=not converts, **same, **common(batch, w13, tuning.up, parts, is_few=True),
    )  # fmt: skip
    few.down[(len(x) * triton.cdiv(w2.rows * slots, tuning.down.rows),)](
        batch.hidden, w2.arguments(), ids, ids.stride(), weights, weights.stride(), out, out.stride(),
        w2.size, inner, w2.rows, LOWER=1.0 / batch.raised, **same,
        **common(batch, w2, tuning.down, slots, is_few=True),
    )  # fmt: skip
    return out


def pairs_by_warps(
    batch: Batch, experts: Packed, weights: torch.Tensor, out: torch.Tensor, tiles: tuple[Warps, Warps]
) -> torch.Tensor:
    """Four-bit weights of routed experts, for BY_WARPS pairs at most."""
    site, x, ids, w13, w2 = batch.choice.site, batch.x, batch.ids, experts.w13, experts.w2
    (pairs, inner), (up, down), lift = batch.hidden.shape, tiles, batch.choice.lift
    _convert(batch, in_order=True)
    one.up[(pairs * (w13.rows // up.rows),)](
        batch.given, batch.x_factor, w13.arguments(), ids, ids.stride(), batch.hidden, w13.size, inner,
        (site.alpha, site.beta, site.limit), RAISE=lift, **_by_warps(batch, up),
    )  # fmt: skip
    one.down[(len(x) * (w2.rows // down.rows),)](
        batch.hidden, w2.arguments(), ids, ids.stride(), weights, weights.stride(), out, out.stride(), w2.size, inner,
        w2.rows, LOWER=1.0 / lift,
        **_by_warps(batch, replace(down, warps=power_of_two_above(batch.slots) * down.warps)),
    )  # fmt: skip
    return out


def _convert(batch: Batch, *, in_order: bool) -> None:
    """Tokens in fp16. in_order: as they are numbered."""
    x, width = batch.x, batch.given.shape[1]
    few.begin[(len(x),)](
        x, x.stride(), batch.given, batch.x_factor, x.shape[1], width, WIDE=power_of_two_above(max(width, 64)),
        FOUR_BIT=is_packed(batch.choice.stored), IN_ORDER=in_order, EARLY=batch.early, num_warps=8,
        **after(batch.early),
    )  # fmt: skip


def _by_warps(batch: Batch, tile: Warps) -> dict[str, Any]:
    """Launch arguments that both products by warps take."""
    return {
        "SLOTS": batch.slots,
        "BN": tile.rows,
        "WARPS": tile.warps,
        "ALONG": tile.along,
        "FORMAT": batch.format,
        "NATIVE": batch.native,
        "EARLY": batch.early,
        "num_warps": tile.warps,
        **({"maxnreg": tile.registers} if tile.registers and batch.is_hopper else {}),
        **after(batch.early),
    }
