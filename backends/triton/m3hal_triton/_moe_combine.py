"""What comes between the experts' products where sums are split, and after them."""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._moe_gemm import activated


@triton.jit(do_not_specialize=["positions"])
def activate(
    raw,  # fp32 [SPLITS, positions, 2 * inner], gate and up rows alternating by eight
    hidden,  # [positions, inner]
    positions,
    inner,
    numbers,  # alpha, beta, limit
    RAISE: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The activation of sums over splits. Rows that no token has hold what they held, and stay without a reader."""
    position = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = feature < inner
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate, up = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for split in tl.static_range(SPLITS):
        at = raw + (split * positions + position) * 2 * inner + feature // 8 * 16 + feature % 8
        gate += tl.load(at, mask=inside, other=0.0)
        up += tl.load(at + 8, mask=inside, other=0.0)
    alpha, beta, limit = numbers
    result = activated(gate, up, alpha, beta, limit) * RAISE
    tl.store(hidden + position * inner + feature, result.to(hidden.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["positions_count"],
    do_not_specialize_on_alignment=["ids", "weights", "positions"],
)
def combine(
    parts,  # [SPLITS, positions, width]
    positions,
    positions_count,
    ids,
    id_strides,
    weights,
    weight_strides,
    shared,  # [T, width], or None
    out,
    out_strides,
    width,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
    LAST: tl.constexpr = False,  # whether the last slot is the shared expert's
    powers=None,  # fp32 [positions, tiles], what each tile of parts is multiplied by
    WIDTH: tl.constexpr = 0,  # of a tile
):
    """The weighted sum of a token's parts in the order of their slots, and the shared expert's; rounded once."""
    token = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = COLUMNS if powers is None else WIDTH
    tile = tl.program_id(1) * (COLUMNS // TILE) + tl.arange(0, COLUMNS // TILE)[:, None]
    column = tile * TILE + tl.arange(0, TILE)[None, :]
    inside = column < width
    # what was there before w2's programs began, asked for before they have ended; from the L2 cache, as the L1 cache
    # may have what was there before a kernel that this one hasn't waited for
    slots = ()
    for slot in tl.static_range(SLOTS):
        if LAST and slot == SLOTS - 1:
            here, weight = token >= 0, 1.0
        else:
            here = tl.load(ids + token * id_strides[0] + slot * id_strides[1], cache_modifier=".cg") >= 0
            at = weights + token * weight_strides[0] + slot * weight_strides[1]
            weight = tl.load(at, mask=here, other=0.0, cache_modifier=".cg")
        position = tl.load(positions + token * SLOTS + slot, mask=here, other=0, cache_modifier=".cg").to(tl.int64)
        slots += ((here, weight, position),)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((COLUMNS // TILE, TILE), tl.float32)
    for slot in tl.static_range(SLOTS):
        here, weight, position = slots[slot]
        there = inside & (column * 0 + here > 0)
        part = tl.zeros((COLUMNS // TILE, TILE), tl.float32)
        for split in tl.static_range(SPLITS):
            at = parts + (split * positions_count + position) * width + column
            part += tl.load(at, mask=there, other=0.0).to(tl.float32)
        if powers is not None:
            tiles = tl.cdiv(width, TILE)
            real = (tile < tiles) & (tile * 0 + here > 0)
            weight = weight * tl.load(powers + position * tiles + tile, mask=real, other=0.0)
        total += part * weight
    if shared is not None:
        total += tl.load(shared + token * width + column, mask=inside, other=0.0).to(tl.float32)
    at = out + token * out_strides[0] + column * out_strides[1]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)
