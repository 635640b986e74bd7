"""The experts' products for few tokens, where a kernel more costs as much as a megabyte of weights.

Nothing is sorted beforehand: each program finds its work item among the ids. Whoever is the last to add to a tile
finishes it: the last part of a split sum activates it, the last expert of some columns of the output weighs and adds
all of them, in the order of their splits and slots, whatever order they came in. Weights are fetched to the L2 cache
before a kernel waits for the one before it. So a call is three kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._moe_align import convert, expert_of
from m3hal_triton._moe_gemm import activated, product, rows_of, span

#: pairs up to which programs find their items themselves
PAIRS = 64
_ARRAYS = ["ids", "counters", "x_factor", "weights"]


@triton.jit
def _find(
    ids, id_strides, pairs, item,
    SLOTS: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A work item's expert, int64, its pairs, how many they are (none beyond the last item), and how many items are.

    Pairs have the numbers ``token * SLOTS + slot``; [BT], the last one again beyond the count.
    """
    pair, e = tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    whose = expert_of(ids, id_strides, pair, pairs, SLOTS, SHARED, ".cg")
    tiles = tl.cdiv(tl.sum((whose[None, :] == e[:, None]).to(tl.int32), 1), BT)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= item).to(tl.int32), 0)
    before = tl.sum(tl.where(e < expert, tiles, 0), 0)
    mine = (whose == expert).to(tl.int32)
    start = (item - before) * BT
    count = tl.minimum(tl.sum(mine, 0) - start, BT)
    rank = tl.cumsum(mine, 0) - 1
    wanted = start + tl.minimum(tl.arange(0, BT), count - 1)
    chosen = (mine[None, :] > 0) & (rank[None, :] == wanted[:, None])
    found = tl.sum(tl.where(chosen, pair[None, :], 0), 1)
    return tl.where(count > 0, expert, 0).to(tl.int64), found.to(tl.int64), count, tl.sum(tiles, 0)


@triton.jit
def _fetch(codes, k, size, ELEMENT: tl.constexpr):
    """Asks the L2 cache for ``size`` bytes of each row from column k on; a column has 2**ELEMENT halves of a byte."""
    at = codes.to(tl.int64) + (k << ELEMENT) // 2
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [at, at.to(tl.int32) * 0 + size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _arrive(counter):
    """How many came before; what they stored can be read."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1)


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
        convert(x, x_strides, wide, x_factor, program - 1, size, padded, WIDE, FOUR_BIT)


@triton.jit(do_not_specialize=["pairs", "ahead"], do_not_specialize_on_alignment=_ARRAYS)
def up(
    x,
    x_strides,
    x_factor,  # fp32 [T], or None
    matrix,
    ids,
    id_strides,
    counters,  # [items, tiles]
    hidden,  # [pairs, inner]
    raw,  # None, or fp32 [SPLITS, pairs, 2 * inner]
    pairs,
    size,  # columns of the matrix
    width,  # columns of x: more where it was filled up
    inner,  # features of hidden, a multiple of 64; gate and up rows alternate in the matrix
    numbers,  # alpha, beta, limit
    ahead,  # bytes of each row that are fetched early
    SLOTS: tl.constexpr,
    SHARED: tl.constexpr,  # the shared expert, which every token has in its last slot; -1: none
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
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
    MASKED: tl.constexpr,
    ELEMENT: tl.constexpr,  # logarithm of a code's bits, less 2
    EARLY: tl.constexpr,
):
    """The activation of w13 times the tokens, for each pair."""
    tiles = tl.cdiv(2 * inner, BN)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles % SPLITS
    item = tl.program_id(0) // tiles // SPLITS
    expert, pair, count, _ = _find(ids, id_strides, pairs, item, SLOTS, SHARED, EXPERTS, PAIRS, BT)
    n = tile * BN + tl.arange(0, BN)
    row = rows_of(matrix, expert, n, 2 * inner)
    first, last = span(split, size, BK, SPLITS)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if ahead > 0:
            _fetch(row[0], first, ahead, ELEMENT)
        tl.extra.cuda.gdc_wait()
    if count <= 0:
        return
    there = tl.arange(0, BT) < count
    inputs = x + (pair // SLOTS * x_strides[0])[:, None]
    total, _ = product(
        row, inputs, inputs, there[:, None], x_strides[1], first, last, size, width,
        BN, BT, 0, BK, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, MASKED,
    )  # fmt: skip
    total *= row[3]
    if x_factor is not None:
        total *= tl.load(x_factor + pair // SLOTS, mask=there, other=0.0)[None, :]
    if SPLITS > 1:
        at = raw + (pair * (2 * inner))[None, :] + n[:, None]
        inside = (n < 2 * inner)[:, None] & there[None, :]
        step = pairs.to(tl.int64) * 2 * inner
        tl.store(at + split * step, total, mask=inside)
        if _arrive(counters + item * tiles + tile) < SPLITS - 1:
            return
        total = tl.zeros((BN, BT), tl.float32)
        for part in tl.static_range(SPLITS):
            total += tl.load(at + part * step, mask=inside, other=0.0, cache_modifier=".cg")
    alpha, beta, limit = numbers
    HALF: tl.constexpr = BN // 2
    both = tl.permute(tl.reshape(total, (BN // 16, 2, 8, BT)), (0, 2, 3, 1))
    gate, above = tl.split(tl.reshape(both, (HALF, BT, 2)))
    result = activated(gate, above, alpha, beta, limit) * RAISE
    feature = tile * HALF + tl.arange(0, HALF)
    to = hidden + (pair * inner)[None, :] + feature[:, None]
    tl.store(to, result.to(hidden.dtype.element_ty), mask=(feature < inner)[:, None] & there[None, :])


@triton.jit
def _sum(
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


@triton.jit(do_not_specialize=["pairs", "ahead"], do_not_specialize_on_alignment=_ARRAYS)
def down(
    hidden,  # [pairs, inner]
    matrix,
    ids,
    id_strides,
    weights,
    weight_strides,
    counters,  # [tiles]
    parts,  # [SPLITS, pairs, rows]
    out,  # [T, rows], or None: a kernel of its own makes the sum
    out_strides,
    pairs,
    size,  # features that w2 has
    inner,
    rows,
    ahead,
    SLOTS: tl.constexpr,
    SHARED: tl.constexpr,  # the shared expert, which every token has in its last slot; -1: none
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    TOKENS: tl.constexpr,
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
    MASKED: tl.constexpr,
    ELEMENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """w2 times the hidden activations, and the output."""
    tiles = tl.cdiv(rows, BN)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles % SPLITS
    item = tl.program_id(0) // tiles // SPLITS
    expert, pair, count, items = _find(ids, id_strides, pairs, item, SLOTS, SHARED, EXPERTS, PAIRS, BT)
    n = tile * BN + tl.arange(0, BN)
    row = rows_of(matrix, expert, n, rows)
    first, last = span(split, size, BK, SPLITS)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if ahead > 0:
            _fetch(row[0], first, ahead, ELEMENT)
        tl.extra.cuda.gdc_wait()
    before = -1  # without any item, programs write zeros
    if count > 0:
        there = tl.arange(0, BT) < count
        inputs = hidden + (pair * inner)[:, None]
        total, _ = product(
            row, inputs, inputs, there[:, None], 1, first, last, size, inner,
            BN, BT, 0, BK, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, MASKED,
        )  # fmt: skip
        total *= row[3] * LOWER
        at = parts + ((split * pairs + pair) * rows)[None, :] + n[:, None]
        tl.store(at, total, mask=(n < rows)[:, None] & there[None, :])
        if out is not None:
            before = _arrive(counters + tile)
    if out is not None:  # noqa: SIM102 (decided when it is compiled)
        if before == items * SPLITS - 1:
            _sum(
                parts, ids, id_strides, weights, weight_strides, out, out_strides, n, pairs, rows,
                SLOTS, SHARED, TOKENS, SPLITS, BN,
            )  # fmt: skip
