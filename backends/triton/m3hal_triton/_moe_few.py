"""The experts' products for few pairs of a token and an expert, where a kernel costs as much as megabytes of weights.

Each pair is a work item, so there is nothing to sort. Whoever is the last to add to a tile finishes it: the last part
of a split sum activates it, the last expert of some columns of the output weighs and adds all of them, in the order of
their splits and slots, whatever order they came in. So a call is three kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._moe_align import convert, expert_of
from m3hal_triton._moe_gemm import activated
from m3hal_triton._moe_product import product, rows_of, span

#: pairs at most
PAIRS = 16
#: columns of a product, of which one is used; triton 3.6 makes slower products of fewer
COLUMNS = 16
_ARRAYS = ["ids", "counters", "x_factor", "weights"]


@triton.jit
def expert_at(ids, id_strides, pair, SLOTS: tl.constexpr, SHARED: tl.constexpr):
    """int64; -1: none. What is read here was there before the kernel that launched this one early had begun."""
    return expert_of(ids, id_strides, pair, pair + 1, SLOTS, SHARED, ".cg").to(tl.int64)


@triton.jit
def arrive(counter):
    """How many came before; what they stored can be read."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1)


@triton.jit
def _first(sums, BT: tl.constexpr):
    """The first column."""
    return tl.sum(tl.where(tl.arange(0, BT)[None, :] == 0, sums, 0.0), 1)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_ARRAYS)
def begin(
    x,
    x_strides,
    wide,  # fp16 [T, padded], or None
    x_factor,
    counters,
    count,
    size,
    padded,
    WIDE: tl.constexpr,
    FOUR_BIT: tl.constexpr,
    ZEROS: tl.constexpr,
    EARLY: tl.constexpr,
    IN_ORDER: tl.constexpr = False,  # of convert
):
    """Counters of zero; program t + 1 converts token t."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    if program == 0:
        for low in range(0, count, ZEROS):
            at = low + tl.arange(0, ZEROS)
            tl.store(counters + at, tl.zeros((ZEROS,), tl.int32), mask=at < count)
    elif wide is not None:
        convert(x, x_strides, wide, x_factor, program - 1, size, padded, WIDE, FOUR_BIT, IN_ORDER)


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=_ARRAYS)
def up(
    x,
    x_strides,
    x_factor,  # fp32 [T], or None
    matrix,
    ids,
    id_strides,
    counters,  # [pairs, tiles]
    hidden,  # [pairs, inner]
    raw,  # None, or fp32 [SPLITS, pairs, 2 * inner]
    pairs,
    size,  # columns of the matrix
    width,  # columns of x: more where it was filled up
    inner,  # features of hidden, a multiple of 64; gate and up rows alternate in the matrix
    numbers,  # alpha, beta, limit
    SLOTS: tl.constexpr,
    SHARED: tl.constexpr,  # the shared expert, which every token has in its last slot; -1: none
    RAISE: tl.constexpr,  # what hidden is multiplied by
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The activation of w13 times the tokens, for each pair."""
    tiles = tl.cdiv(2 * inner, BN)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles % SPLITS
    pair = tl.program_id(0) // (tiles * SPLITS)
    expert = expert_at(ids, id_strides, pair, SLOTS, SHARED)
    n = tile * BN + tl.arange(0, BN)
    row = rows_of(matrix, tl.maximum(expert, 0), n, 2 * inner)
    first, last = span(split, size, BK, SPLITS)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if expert < 0:
        return
    column = tl.arange(0, BT)[:, None]
    token = (pair // SLOTS).to(tl.int64)
    inputs = x + token * x_strides[0] + column * 0
    total, _ = product(
        row, inputs, inputs, column == 0, x_strides[1], first, last, size, width,
        BN, BT, 0, BK, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, True,
    )  # fmt: skip
    sums = _first(total * row[3], BT)
    if x_factor is not None:
        sums *= tl.load(x_factor + token)
    HALF: tl.constexpr = BN // 2
    feature = tile * HALF + tl.arange(0, HALF)
    if SPLITS > 1:
        mine = raw + pair.to(tl.int64) * 2 * inner
        step = pairs.to(tl.int64) * 2 * inner
        tl.store(mine + split * step + n, sums, mask=n < 2 * inner)
        if arrive(counters + pair * tiles + tile) < SPLITS - 1:
            return
        gate, above = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
        at = mine + feature // 8 * 16 + feature % 8
        for _ in tl.static_range(SPLITS):
            gate += tl.load(at, mask=feature < inner, other=0.0, cache_modifier=".cg")
            above += tl.load(at + 8, mask=feature < inner, other=0.0, cache_modifier=".cg")
            at += step
    else:
        both = tl.permute(tl.reshape(sums, (BN // 16, 2, 8)), (0, 2, 1))
        gate, above = tl.split(tl.reshape(both, (HALF, 2)))
    alpha, beta, limit = numbers
    result = activated(gate, above, alpha, beta, limit) * RAISE
    tl.store(hidden + pair.to(tl.int64) * inner + feature, result.to(hidden.dtype.element_ty), mask=feature < inner)


@triton.jit
def weighted_sum(
    parts, ids, id_strides, weights, weight_strides, out, out_strides, n, pairs, rows,
    SLOTS: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The weighted sum of all tokens' parts in columns n, in the order of slots; rounded once."""
    token = tl.arange(0, TOKENS).to(tl.int64)
    known = token < pairs // SLOTS
    total = tl.zeros((TOKENS, BN), tl.float32)
    for slot in tl.static_range(SLOTS):
        if SHARED >= 0 and slot == SLOTS - 1:
            here, weight = known, tl.full((TOKENS,), 1.0, tl.float32)
        else:
            here = tl.load(ids + token * id_strides[0] + slot * id_strides[1], mask=known, other=-1) >= 0
            weight = tl.load(weights + token * weight_strides[0] + slot * weight_strides[1], mask=here, other=0.0)
        there = here[:, None] & (n < rows)[None, :]
        part = tl.zeros((TOKENS, BN), tl.float32)
        for split in tl.static_range(SPLITS):
            at = parts + ((split * pairs + token * SLOTS + slot) * rows)[:, None] + n[None, :]
            part += tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
        total += part * weight[:, None]
    at = out + (token * out_strides[0])[:, None] + (n * out_strides[1])[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=known[:, None] & (n < rows)[None, :])


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=_ARRAYS)
def down(
    hidden,  # [pairs, inner]
    matrix,
    ids,
    id_strides,
    weights,
    weight_strides,
    counters,  # [tiles]
    parts,  # [SPLITS, pairs, rows]
    out,  # [T, rows]
    out_strides,
    pairs,
    size,  # features that w2 has
    inner,
    rows,
    SLOTS: tl.constexpr,
    SHARED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    LOWER: tl.constexpr,  # 1 / RAISE
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """w2 times the hidden activations, and the output."""
    tiles = tl.cdiv(rows, BN)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles % SPLITS
    pair = tl.program_id(0) // (tiles * SPLITS)
    expert = expert_at(ids, id_strides, pair, SLOTS, SHARED)
    n = tile * BN + tl.arange(0, BN)
    row = rows_of(matrix, tl.maximum(expert, 0), n, rows)
    first, last = span(split, size, BK, SPLITS)
    every = tl.arange(0, PAIRS)
    items = tl.sum((expert_of(ids, id_strides, every, pairs, SLOTS, SHARED, ".cg") >= 0).to(tl.int32), 0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    before = -1  # without any expert, programs write zeros
    if expert >= 0:
        column = tl.arange(0, BT)[:, None]
        inputs = hidden + pair.to(tl.int64) * inner + column * 0
        total, _ = product(
            row, inputs, inputs, column == 0, 1, first, last, size, inner,
            BN, BT, 0, BK, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, True,
        )  # fmt: skip
        sums = _first(total * (row[3] * LOWER), BT)
        tl.store(parts + (split * pairs + pair).to(tl.int64) * rows + n, sums, mask=n < rows)
        before = arrive(counters + tile)
    if before == items * SPLITS - 1:
        weighted_sum(
            parts, ids, id_strides, weights, weight_strides, out, out_strides, n, pairs, rows,
            SLOTS, SHARED, TOKENS, SPLITS, BN,
        )  # fmt: skip
