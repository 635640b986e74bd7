"""The experts' two products of four-bit weights for one to three tokens: as in :mod:`_moe_few`, by warps.

A shared expert beside the routed ones would leave three of eight experts' warps of w2 without work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._moe_by_warps import element_of, product
from m3hal_triton._moe_few import chosen, expert_at
from m3hal_triton._moe_gemm import activated

_ARRAYS = ["ids", "weights", "x_factor"]


@triton.jit(do_not_specialize_on_alignment=_ARRAYS)
def up(
    tokens,  # fp16 [T, size]
    x_factor,
    matrix,
    ids,
    id_strides,
    hidden,  # [pairs, inner], as w2's columns are numbered
    size,
    inner,  # features of hidden; gate and up rows alternate in the matrix
    numbers,  # alpha, beta, limit
    SLOTS: tl.constexpr,
    RAISE: tl.constexpr,  # what hidden is multiplied by
    BN: tl.constexpr,
    WARPS: tl.constexpr,
    ALONG: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The activation of w13 times the tokens, for each pair."""
    tiles = 2 * inner // BN
    tile, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    expert = expert_at(ids, id_strides, pair, SLOTS, -1)
    n = tile * BN + tl.arange(0, BN)
    factor = tl.load(matrix[5] + tl.maximum(expert, 0) * (2 * inner) + n)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if expert < 0:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        return
    token = (pair // SLOTS).to(tl.int64)
    ROWS: tl.constexpr = BN * ALONG // WARPS
    first = tile * BN + tl.arange(0, WARPS) // ALONG * ROWS
    sums = product(
        matrix, expert, first, tokens + token * size, size, 2 * inner, ROWS, WARPS, ALONG, FORMAT, NATIVE, EARLY
    )
    sums = tl.reshape(tl.sum(tl.reshape(sums, (WARPS // ALONG, ALONG, ROWS)), 1), (BN,))
    sums *= factor * tl.load(x_factor + token)
    HALF: tl.constexpr = BN // 2
    both = tl.permute(tl.reshape(sums, (BN // 16, 2, 8)), (0, 2, 1))
    gate, above = tl.split(tl.reshape(both, (HALF, 2)))
    alpha, beta, limit = numbers
    result = activated(gate, above, alpha, beta, limit) * RAISE
    at = hidden + pair.to(tl.int64) * inner + element_of(tile * HALF + tl.arange(0, HALF))
    tl.store(at, result.to(hidden.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=_ARRAYS)
def down(
    hidden,  # [pairs, inner]
    matrix,
    ids,
    id_strides,
    weights,
    weight_strides,
    out,  # [T, rows]
    out_strides,
    size,
    inner,
    rows,
    SLOTS: tl.constexpr,
    LOWER: tl.constexpr,  # 1 / RAISE
    BN: tl.constexpr,
    WARPS: tl.constexpr,  # for each slot, and more up to a power of two, ALONG
    ALONG: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """w2 times the hidden activations of a token's experts, weighted and summed; each expert has warps of its own."""
    tiles = rows // BN
    tile, token = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    slot = tl.arange(0, WARPS) // ALONG
    expert, weight, whose = chosen(ids, id_strides, weights, weight_strides, token, slot, SLOTS, -1)
    n = tile * BN + tl.arange(0, BN)
    factor = tl.load(matrix[5] + (whose * rows)[:, None] + n[None, :]) * (weight * LOWER)[:, None]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    mine = hidden + (token * SLOTS + tl.minimum(slot, SLOTS - 1)) * inner
    sums = product(
        matrix, whose[None, :, None, None], tile * BN + slot * 0, mine[None, :, None, None, None], size, rows,
        BN, WARPS, ALONG, FORMAT, NATIVE, EARLY,
    )  # fmt: skip
    sums = tl.where((expert >= 0)[:, None], sums * factor, 0.0)
    at = out + token * out_strides[0] + n * out_strides[1]
    tl.store(at, tl.sum(sums, 0).to(out.dtype.element_ty))
