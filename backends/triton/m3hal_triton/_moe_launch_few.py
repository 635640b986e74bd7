"""Launches of ``moe_experts`` where programs find their items themselves: three kernels a call."""

from __future__ import annotations

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
    site, memory, x, ids = batch.choice.site, batch.memory, batch.x, batch.ids
    w13, w2 = experts.w13, experts.w2
    wide, tuning, (pairs, inner) = memory.find("wide", torch.float16, len(x), -1), batch.tuning, batch.hidden.shape
    counters = memory.take("counters", torch.int32, -1)
    up_tiles, down_tiles = triton.cdiv(w13.rows, tuning.up.rows), triton.cdiv(w2.rows, tuning.down.rows)
    zeros, padded = pairs * up_tiles + down_tiles, 0 if wide is None else wide.shape[1]
    few.begin[(1 if wide is None else 1 + len(x),)](
        x, x.stride(), wide, batch.x_factor, counters, zeros, x.shape[1], padded,
        WIDE=power_of_two_above(max(padded, 64)), FOUR_BIT=is_packed(batch.choice.stored), ZEROS=1024,
        EARLY=batch.early, num_warps=8, **after(batch.early),
    )  # fmt: skip
    same = {
        "SLOTS": batch.slots,
        "SHARED": batch.shared,
    }
    few.up[(pairs * batch.splits[0] * up_tiles,)](
        batch.given, batch.given.stride(), batch.x_factor, w13.arguments(), ids, ids.stride(), counters,
        batch.hidden, batch.raw, pairs, w13.size, batch.given.shape[1], inner,
        (site.alpha, site.beta, site.limit), RAISE=batch.raised, **same,
        **common(batch, w13, tuning.up, batch.splits[0], is_few=True),
    )  # fmt: skip
    few.down[(pairs * batch.splits[1] * down_tiles,)](
        batch.hidden, w2.arguments(), ids, ids.stride(), weights, weights.stride(),
        counters[pairs * up_tiles :], batch.parts, out, out.stride(), pairs, w2.size, inner, w2.rows,
        TOKENS=power_of_two_above(len(x)), PAIRS=power_of_two_above(pairs), LOWER=1.0 / batch.raised, **same,
        **common(batch, w2, tuning.down, batch.splits[1], is_few=True),
    )  # fmt: skip
    return out


def pairs_by_warps(
    batch: Batch, experts: Packed, weights: torch.Tensor, out: torch.Tensor, tiles: tuple[Warps, Warps]
) -> torch.Tensor:
    """Four-bit weights for BY_WARPS pairs at most."""
    site, memory, x, ids = batch.choice.site, batch.memory, batch.x, batch.ids
    w13, w2 = experts.w13, experts.w2
    (pairs, inner), (up, down) = batch.hidden.shape, tiles
    counters = memory.take("counters", torch.int32, -1)
    up_tiles, down_tiles = w13.rows // up.rows, w2.rows // down.rows
    tokens = memory.take("wide", torch.float16, len(x), -1)
    few.begin[(1 + len(x),)](
        x, x.stride(), tokens, batch.x_factor, counters, down_tiles, x.shape[1], x.shape[1],
        WIDE=power_of_two_above(x.shape[1]), FOUR_BIT=True, IN_ORDER=True, ZEROS=1024, EARLY=batch.early,
        num_warps=8, **after(batch.early),
    )  # fmt: skip
    lift = batch.choice.lift
    one.up[(pairs * up_tiles,)](
        tokens, batch.x_factor, w13.arguments(), ids, ids.stride(), batch.hidden, w13.size, inner,
        (site.alpha, site.beta, site.limit), RAISE=lift, **_by_warps(batch, up),
    )  # fmt: skip
    one.down[(pairs * down_tiles,)](
        batch.hidden, w2.arguments(), ids, ids.stride(), weights, weights.stride(), counters, batch.parts, out,
        out.stride(), pairs, w2.size, inner, w2.rows, TOKENS=power_of_two_above(len(x)),
        PAIRS=power_of_two_above(pairs), LOWER=1.0 / lift, **_by_warps(batch, down),
    )  # fmt: skip
    return out


def _by_warps(batch: Batch, tile: Warps) -> dict[str, Any]:
    """Launch arguments that both products by warps take."""
    return {
        "SLOTS": batch.slots,
        "SHARED": batch.shared,
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
