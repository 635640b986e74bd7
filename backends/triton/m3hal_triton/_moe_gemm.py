"""The experts' two products: one loop over K, in two kernels that end differently, and the sum of their results.

A tile is BN rows of a weight matrix times BT tokens of its expert: weights are the left operand, so that they reach the
matrix unit from registers, where stored codes are decoded (:mod:`_moe_decode`), and fill its rows however few the
tokens are. Each program takes one tile of one work item, an expert and up to BT of its tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._moe_decode import load_weights

@triton.jit
def _product(
    codes, scales, base, inputs, size, input_size,
    BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr,
    EVEN: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, step,
):  # fmt: skip
    """fp32 [BN, BT]. inputs: pointers to tokens [BT, 1], whose columns lie ``step`` apart."""
    total = tl.zeros((BN, BT), tl.float32)
    column = tl.arange(0, BK)[None, :]
    for k in tl.range(0, size, BK, num_stages=STAGES):
        weights = load_weights(codes, scales, base, k, size, BN, BK, FORMAT, COMPUTE, EVEN, NATIVE)
        at = inputs + (k + column) * step
        if EVEN:  # noqa: SIM108
            tokens = tl.load(at)
        else:
            tokens = tl.load(at, mask=k + column < input_size, other=0.0)
        total = tl.dot(weights, tl.trans(tokens), total, input_precision=PRECISION)
    return total


@triton.jit
def _item(items, total, order, tokens, program, tiles, BT: tl.constexpr, SORTED: tl.constexpr):
    """Expert, first position and tokens of a program's work item; no tokens beyond the last item."""
    item = program // tiles
    if SORTED:
        real = item < tl.load(total)
        expert = tl.load(items + item * 4, mask=real, other=0)
        start = tl.load(items + item * 4 + 1, mask=real, other=0)
        count = tl.load(items + item * 4 + 2, mask=real, other=0)
    else:  # one expert that every token takes
        expert, start = item * 0, item * BT
        count = tl.minimum(tokens - start, BT)
    return expert.to(tl.int64), start, count


@triton.jit
def _pairs(order, start, count, BT: tl.constexpr, SORTED: tl.constexpr):
    """Position int64 and (token, slot) of each column of the tile; columns beyond the last are copies of it."""
    position = (start + tl.minimum(tl.arange(0, BT), count - 1)).to(tl.int64)
    pair = tl.load(order + position).to(tl.int64) if SORTED else position
    return position, pair


@triton.jit
def _rows(matrix, expert, n, height):
    """Of a packed matrix (codes, their strides, scales, their strides, base, factor): what a tile's rows need."""
    codes, code_strides, scales, scale_strides, base, factor = matrix
    row = tl.minimum(n, height - 1).to(tl.int64)
    codes = codes + (expert * code_strides[0] + row * code_strides[1])[:, None]
    flat = expert * height + row
    bases = 0
    multiplier = 1.0
    if scales is not None:
        scales = scales + (expert * scale_strides[0] + row * scale_strides[1])[:, None]
    if base is not None:
        bases = tl.load(base + flat)
    if factor is not None:
        multiplier = tl.load(factor + flat)[:, None]
    return codes, scales, bases, multiplier


@triton.jit
def _activated(gate, up, alpha, beta, limit):
    """Comparisons with NaN are false, so a NaN stays."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return tl.div_rn(gate, 1.0 + tl.exp(-alpha * gate)) * (up + beta)


_NUMBERS = ["tokens", "hidden_from", "size", "inner"]
_ARRAYS = ["items", "total", "order", "x_factor", "weights"]


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=_ARRAYS)
def up(
    x,
    x_strides,
    x_factor,  # fp32 [T], of fp16 activations
    matrix,
    items,
    total,
    order,
    hidden,  # [positions, inner]
    tokens,
    size,  # columns of the matrix
    width,  # columns of x: more where it was filled up
    inner,  # features of hidden, a multiple of BLOCK; gate and up rows alternate in the matrix
    alpha,
    beta,
    limit,
    SLOTS: tl.constexpr,
    RAISE: tl.constexpr,  # what hidden is multiplied by
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    SORTED: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The activation of w13 times the tokens, in the order of their experts."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    tiles = tl.cdiv(2 * inner, BN)
    expert, start, count = _item(items, total, order, tokens, program, tiles, BT, SORTED)
    if count <= 0:
        return
    n = program % tiles * BN + tl.arange(0, BN)
    codes, scales, base, multiplier = _rows(matrix, expert, n, 2 * inner)
    position, pair = _pairs(order, start, count, BT, SORTED)
    token = pair // SLOTS
    sums = _product(
        codes, scales, base, x + (token * x_strides[0])[:, None], size, width,
        BN, BT, BK, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, x_strides[1],
    ) * multiplier  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if x_factor is not None:
        sums = sums * tl.load(x_factor + token)[None, :]
    HALF: tl.constexpr = BN // 2
    both = tl.permute(tl.reshape(sums, (BN // 16, 2, 8, BT)), (0, 2, 3, 1))
    gate, above = tl.split(tl.reshape(both, (HALF, BT, 2)))
    result = _activated(gate, above, alpha, beta, limit) * RAISE
    feature = program % tiles * HALF + tl.arange(0, HALF)
    there = (feature < inner)[:, None] & (tl.arange(0, BT) < count)[None, :]
    at = hidden + (position * inner)[None, :] + feature[:, None]
    tl.store(at, result.to(hidden.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=_ARRAYS)
def down(
    hidden,  # [positions, inner]
    matrix,
    items,
    total,
    order,
    weights,
    weight_strides,
    parts,  # [pairs, rows]
    tokens,
    size,  # features that w2 has
    inner,
    rows,
    SLOTS: tl.constexpr,
    LOWER: tl.constexpr,  # 1 / RAISE
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    SORTED: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """w2 times the hidden activations, times the routing weight, a row for each (token, slot)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    tiles = tl.cdiv(rows, BN)
    expert, start, count = _item(items, total, order, tokens, program, tiles, BT, SORTED)
    if count <= 0:
        return
    n = program % tiles * BN + tl.arange(0, BN)
    codes, scales, base, multiplier = _rows(matrix, expert, n, rows)
    position, pair = _pairs(order, start, count, BT, SORTED)
    sums = _product(
        codes, scales, base, hidden + (position * inner)[:, None], size, inner,
        BN, BT, BK, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, 1,
    ) * multiplier  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.full((BT,), LOWER, tl.float32)
    if weights is not None:
        weight = weight * tl.load(weights + pair // SLOTS * weight_strides[0] + pair % SLOTS * weight_strides[1])
    there = (n < rows)[:, None] & (tl.arange(0, BT) < count)[None, :]
    at = parts + (pair * rows)[None, :] + n[:, None]
    tl.store(at, (sums * weight[None, :]).to(parts.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ids"])
def combine(
    parts,
    ids,
    id_strides,
    shared,  # [T, width]
    out,
    out_strides,
    width,
    tokens,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The sum of a token's parts in the order of their slots, then the shared expert's; rounded once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(SLOTS):
        expert = tl.load(ids + token * id_strides[0] + slot * id_strides[1])
        here = inside & (expert + column * 0 >= 0)
        total += tl.load(parts + (token * SLOTS + slot) * width + column, mask=here, other=0.0).to(tl.float32)
    if shared is not None:
        total += tl.load(shared + token * width + column, mask=inside, other=0.0).to(tl.float32)
    at = out + token * out_strides[0] + column * out_strides[1]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)
