"""The experts' products for few pairs of a token and an expert, where a kernel costs as much as megabytes of weights.

Each pair is a work item of w13, so there is nothing to sort, and no sum needs a second program: a matrix unit's tile
has more rows than a program needs to fill the GPU, and more columns than there are tokens. So its rows are a few rows
of the weights several times, each time with another part of the columns, or another of the token's experts; each has
a column of the product to itself, and what stands elsewhere is left. A call of bf16 is two kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._moe_align import convert, expert_of
from m3hal_triton._moe_decode import along
from m3hal_triton._moe_gemm import activated
from m3hal_triton._moe_product import product, rows_of

#: pairs at most
PAIRS = 16
#: columns of a product; triton 3.6 makes slower products of fewer
COLUMNS = 16
#: rows of a program at least: eight of gate and eight of up
LEAST_ROWS = 16
_ARRAYS = ["ids", "x_factor", "weights"]


@triton.jit
def expert_at(ids, id_strides, pair, SLOTS: tl.constexpr, SHARED: tl.constexpr):
    """int64; -1: none. What is read here was there before the kernel that launched this one early had begun."""
    return expert_of(ids, id_strides, pair, pair + 1, SLOTS, SHARED, ".cg").to(tl.int64)


@triton.jit
def chosen(ids, id_strides, weights, weight_strides, token, slot, SLOTS: tl.constexpr, SHARED: tl.constexpr):
    """Of a token's slots their experts, int32, -1: none, and weights; and whose rows are read, int64: an absent one's
    are another's, which are read anyway."""
    expert = expert_of(ids, id_strides, token * SLOTS + slot, (token + 1) * SLOTS, SLOTS, SHARED, ".cg")
    whose = tl.maximum(tl.where(expert >= 0, expert, tl.max(expert, 0)), 0).to(tl.int64)
    is_routed = (expert >= 0) & (slot < (SLOTS - 1 if SHARED >= 0 else SLOTS))
    at = weights + token * weight_strides[0] + slot * weight_strides[1]
    return expert, tl.load(at, mask=is_routed, other=1.0, cache_modifier=".cg"), whose


@triton.jit(do_not_specialize_on_alignment=["x_factor"])
def begin(
    x, x_strides, wide, x_factor, size, padded,
    WIDE: tl.constexpr, FOUR_BIT: tl.constexpr, IN_ORDER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program converts a token: :func:`_moe_align.convert`."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    convert(x, x_strides, wide, x_factor, tl.program_id(0), size, padded, WIDE, FOUR_BIT, IN_ORDER)


@triton.jit
def _from(row, column, FORMAT: tl.constexpr, BK: tl.constexpr):
    """What :func:`_moe_product.rows_of` returned, each row from a column of its own on: int32 [BN], multiples of BK."""
    codes, scales, base, factor, strides = row
    UNIT: tl.constexpr = 8 if FORMAT == "mxfp4" or FORMAT == "nvfp4" else 1
    codes += along(column, strides[0], UNIT, BK)[:, None]
    if FORMAT == "mxfp8" or FORMAT == "mxfp4" or FORMAT == "nvfp4":
        scales += along(column, strides[1], 16 if FORMAT == "nvfp4" else 32, BK)[:, None]
    return codes, scales, base, factor, strides


@triton.jit
def _own(sums, part):
    """fp32 [BN], each row's sum in the column of its part."""
    return tl.sum(tl.where(tl.arange(0, sums.shape[1])[None, :] == part[:, None], sums, 0.0), 1)


@triton.jit(do_not_specialize_on_alignment=_ARRAYS)
def up(
    x,
    x_strides,
    x_factor,  # fp32 [T], or None
    matrix,
    ids,
    id_strides,
    hidden,  # [pairs, inner]
    size,  # columns of the matrix
    width,  # columns of x: more where it was filled up
    inner,  # features of hidden, a multiple of 64; gate and up rows alternate in the matrix
    numbers,  # alpha, beta, limit
    SLOTS: tl.constexpr,
    SHARED: tl.constexpr,  # the shared expert, which every token has in its last slot; -1: none
    RAISE: tl.constexpr,  # what hidden is multiplied by
    FIRST: tl.constexpr,  # no kernel of this call ran before
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,  # of a row's columns, beside one another
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The activation of w13 times the tokens, for each pair."""
    if EARLY and FIRST:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: tl.constexpr = BN // PARTS
    tiles = tl.cdiv(2 * inner, ROWS)
    tile, pair = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    expert = expert_at(ids, id_strides, pair, SLOTS, SHARED)
    line = tl.arange(0, BN)
    part, row = line // ROWS, rows_of(matrix, tl.maximum(expert, 0), tile * ROWS + line % ROWS, 2 * inner)
    length = tl.cdiv(size, PARTS * BK) * BK
    if PARTS > 1:
        row = _from(row, part * length, FORMAT, BK)
    if EARLY and not FIRST:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if expert < 0:
        return
    column = tl.arange(0, BT)[:, None]
    token = (pair // SLOTS).to(tl.int64)
    inputs = x + token * x_strides[0] + column * length * x_strides[1]
    total, _ = product(
        row, inputs, inputs, column < PARTS, x_strides[1], 0, length if PARTS > 1 else size, size, width,
        BN, BT, 0, BK, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, True,
    )  # fmt: skip
    sums = tl.sum(tl.reshape(_own(total * row[3], part), (PARTS, ROWS)), 0)
    if x_factor is not None:
        sums *= tl.load(x_factor + token)
    HALF: tl.constexpr = ROWS // 2
    both = tl.permute(tl.reshape(sums, (ROWS // 16, 2, 8)), (0, 2, 1))
    gate, above = tl.split(tl.reshape(both, (HALF, 2)))
    alpha, beta, limit = numbers
    result = activated(gate, above, alpha, beta, limit) * RAISE
    feature = tile * HALF + tl.arange(0, HALF)
    tl.store(hidden + pair.to(tl.int64) * inner + feature, result.to(hidden.dtype.element_ty), mask=feature < inner)


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
    size,  # features that w2 has
    inner,
    rows,
    SLOTS: tl.constexpr,
    SHARED: tl.constexpr,
    LOWER: tl.constexpr,  # 1 / RAISE
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,  # slots, and more up to a power of two
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """w2 times the hidden activations of a token's experts, weighted and summed, in the order of slots."""
    ROWS: tl.constexpr = BN // PARTS
    tiles = tl.cdiv(rows, ROWS)
    tile, token = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    line = tl.arange(0, BN)
    slot = line // ROWS
    expert, weight, whose = chosen(ids, id_strides, weights, weight_strides, token, slot, SLOTS, SHARED)
    row = rows_of(matrix, whose, tile * ROWS + line % ROWS, rows)
    column = tl.arange(0, BT)[:, None]
    pair = token * SLOTS + column
    there = expert_of(ids, id_strides, pair, (token + 1) * SLOTS, SLOTS, SHARED, ".cg") >= 0
    inputs = hidden + pair * inner
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BN, BT), tl.float32)
    if tl.max(expert, 0) >= 0:
        total, _ = product(
            row, inputs, inputs, there, 1, 0, size, size, inner,
            BN, BT, 0, BK, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, True,
        )  # fmt: skip
    sums = tl.where(expert >= 0, _own(total * row[3], slot) * (weight * LOWER), 0.0)
    result = tl.sum(tl.reshape(sums, (PARTS, ROWS)), 0)
    n = tile * ROWS + tl.arange(0, ROWS)
    tl.store(out + token * out_strides[0] + n * out_strides[1], result.to(out.dtype.element_ty), mask=n < rows)
