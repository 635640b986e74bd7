"""The experts' two products of four-bit weights for one to three tokens: as in :mod:`_moe_few`, by warps."""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._moe_align import expert_of
from m3hal_triton._moe_by_warps import element_of, product
from m3hal_triton._moe_few import arrive, expert_at, weighted_sum
from m3hal_triton._moe_gemm import activated

_ARRAYS = ["ids", "counters", "weights", "x_factor"]


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
    SHARED: tl.constexpr,  # the shared expert, which every token has in its last slot; -1: none
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
    expert = expert_at(ids, id_strides, pair, SLOTS, SHARED)
    n = tile * BN + tl.arange(0, BN)
    factor = tl.load(matrix[5] + tl.maximum(expert, 0) * (2 * inner) + n)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if expert < 0:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        return
    token = (pair // SLOTS).to(tl.int64)
    sums = product(
        matrix, expert, tile, tokens + token * size, size, 2 * inner, BN, WARPS, ALONG, FORMAT, NATIVE, EARLY
    )
    sums *= factor * tl.load(x_factor + token)
    HALF: tl.constexpr = BN // 2
    both = tl.permute(tl.reshape(sums, (BN // 16, 2, 8)), (0, 2, 1))
    gate, above = tl.split(tl.reshape(both, (HALF, 2)))
    alpha, beta, limit = numbers
    result = activated(gate, above, alpha, beta, limit) * RAISE
    at = hidden + pair.to(tl.int64) * inner + element_of(tile * HALF + tl.arange(0, HALF))
    tl.store(at, result.to(hidden.dtype.element_ty))


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=_ARRAYS)
def down(
    hidden,  # [pairs, inner]
    matrix,
    ids,
    id_strides,
    weights,
    weight_strides,
    counters,  # [tiles]
    parts,  # [pairs, rows]
    out,  # [T, rows]
    out_strides,
    pairs,
    size,
    inner,
    rows,
    SLOTS: tl.constexpr,
    SHARED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    LOWER: tl.constexpr,  # 1 / RAISE
    BN: tl.constexpr,
    WARPS: tl.constexpr,
    ALONG: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """w2 times the hidden activations, and the output, by the last to add to a tile."""
    tiles = rows // BN
    tile, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    expert = expert_at(ids, id_strides, pair, SLOTS, SHARED)
    n = tile * BN + tl.arange(0, BN)
    factor = tl.load(matrix[5] + tl.maximum(expert, 0) * rows + n)
    every = tl.arange(0, PAIRS)
    items = tl.sum((expert_of(ids, id_strides, every, pairs, SLOTS, SHARED, ".cg") >= 0).to(tl.int32), 0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if expert < 0:
            tl.extra.cuda.gdc_wait()
    before = -1  # without any expert, programs write zeros
    if expert >= 0:
        mine = hidden + pair.to(tl.int64) * inner
        sums = product(matrix, expert, tile, mine, size, rows, BN, WARPS, ALONG, FORMAT, NATIVE, EARLY)
        tl.store(parts + pair.to(tl.int64) * rows + n, sums * (factor * LOWER))
        before = arrive(counters + tile)
    if before == items - 1:
        weighted_sum(
            parts, ids, id_strides, weights, weight_strides, out, out_strides, n, pairs, rows,
            SLOTS, SHARED, TOKENS, 1, BN,
        )  # fmt: skip
