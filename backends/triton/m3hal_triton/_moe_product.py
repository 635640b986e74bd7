"""The experts' products: where weights and tokens of a work item lie, and the loop over K that multiplies them.

A tile is BN rows of a weight matrix times the tokens of one work item, an expert and some of its tokens: weights are
the left operand, so that they reach the matrix unit from registers, where stored codes are decoded
(:mod:`_moe_decode`), and fill its rows however few the tokens are. An item has up to BT tokens, or BT + BX: then a
second, narrow product shares the tile of weights, because experts with a little more than BT tokens are as frequent as
those with a little less.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._moe_decode import TALL, load_scales, load_weights, scales_ahead


@triton.jit
def _columns(inputs, there, k, width, step, BK: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr):
    """[tokens, BK] from column k on; zeros beyond ``width``, and for tokens that are not there."""
    column = k + tl.arange(0, BK)[None, :]
    if MASKED:
        tile = tl.load(inputs + column * step, mask=there if EVEN else there & (column < width), other=0.0)
    elif EVEN:
        tile = tl.load(inputs + column * step)
    else:
        tile = tl.load(inputs + column * step, mask=column < width, other=0.0)
    return tile


@triton.jit
def _waited(total, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    """The sums themselves, asked for at the end of a step, by no instruction.

    Hopper's matrix unit reads a left operand from registers after the instruction has been issued. Triton 3.6 lets such
    products run on into the next step of a loop, which loads its codes into the same registers: sums were wrong, now
    and then. A result that is asked for is waited for.
    """
    if NATIVE == 1 and tl.float16 == COMPUTE:
        total = tl.inline_asm_elementwise("", "=r,0", [total], dtype=tl.float32, is_pure=False, pack=1)
    return total


@triton.jit
def product(
    row, inputs, more, there, step, first, last, size, width,
    BN: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BT] and [BN, BX], over columns ``first`` to ``last``. row: of :func:`rows_of`.

    inputs, more: pointers to tokens [BT, 1] and [BX, 1], whose columns lie ``step`` apart. there: bool [BT, 1], for
    MASKED: which of the former are read. Each step of a tile of weights reads its tokens too, from the L2 cache, which
    is but a little faster than memory: copies of the last token would be a quarter more.
    """
    codes, scales, base, _, strides = row
    total = tl.zeros((BN, BT), tl.float32)
    extra = tl.zeros((BN, BX), tl.float32) if BX > 0 else 0.0
    AHEAD: tl.constexpr = scales_ahead(FORMAT, BK)
    following = load_scales(scales, strides[1], first, size, BK, FORMAT, False) if AHEAD else 0
    for k in tl.range(first, last, BK, num_stages=STAGES):
        if AHEAD:
            stored = following
            following = load_scales(scales, strides[1], k + BK, size, BK, FORMAT, False)
        else:
            stored = load_scales(scales, strides[1], k, size, BK, FORMAT, EVEN)
        weights = load_weights(codes, strides[0], stored, base, k, size, BN, BK, FORMAT, COMPUTE, EVEN, NATIVE)
        tokens = _columns(inputs, there, k, width, step, BK, EVEN, MASKED)
        total = tl.dot(weights, tl.trans(tokens), total, input_precision=PRECISION)
        if BX > 0:
            others = _columns(more, there, k, width, step, BK, EVEN, False)
            extra = tl.dot(weights, tl.trans(others), extra, input_precision=PRECISION)
            extra = _waited(extra, COMPUTE, NATIVE)
        total = _waited(total, COMPUTE, NATIVE)
    return total, extra


@triton.jit
def item_of(items, total, tokens, item, MOST: tl.constexpr, SORTED: tl.constexpr):
    """Expert int64, first position and tokens of a work item; no tokens beyond the last item."""
    if SORTED:
        real = item < tl.load(total, cache_modifier=".cg")
        expert = tl.where(real, tl.load(items + item * 4, cache_modifier=".cg"), 0)  # any item has its place in memory
        start = tl.where(real, tl.load(items + item * 4 + 1, cache_modifier=".cg"), 0)
        count = tl.where(real, tl.load(items + item * 4 + 2, cache_modifier=".cg"), 0)
    else:  # one expert that every token takes
        expert, start = item * 0, item * MOST
        count = tl.minimum(tokens - start, MOST)
    return expert.to(tl.int64), start.to(tl.int64), count


@triton.jit
def tokens_of(order, position, there, SLOTS: tl.constexpr, SORTED: tl.constexpr):
    """int64: whose activations lie at a position."""
    if SORTED:
        position = (tl.load(order + position, mask=there, other=0) // SLOTS).to(tl.int64)
    return position


@triton.jit
def _starts(expert, row, strides):
    """[BN, 1]: where rows start. strides: of experts and rows; in pieces of experts, TALL rows, and a row."""
    if len(strides) == 2:
        at = expert * strides[0] + row * strides[1]
    else:
        at = expert * strides[0] + row // TALL * strides[1] + row % TALL * strides[2]
    return at[:, None]


@triton.jit
def rows_of(matrix, expert, n, height):
    """What a tile's rows need of a packed matrix: pointers to codes and scales, bases and factors, and strides."""
    codes, code_strides, scales, scale_strides, base, factor = matrix
    row = tl.minimum(n, height - 1).to(tl.int64)
    flat = expert * height + row
    scale_rows, bases, multiplier = 0, 0, 1.0
    if scales is not None:
        scale_rows = scales + _starts(expert, row, scale_strides)
    if base is not None:
        bases = tl.load(base + flat)
    if factor is not None:
        multiplier = tl.load(factor + flat)[:, None]
    return codes + _starts(expert, row, code_strides), scale_rows, bases, multiplier, (code_strides, scale_strides)


@triton.jit
def span(split, size, BK: tl.constexpr, SPLITS: tl.constexpr):
    """First and last column of a split."""
    if SPLITS == 1:
        first, last = 0, size
    else:
        part = tl.cdiv(tl.cdiv(size, BK), SPLITS) * BK
        first = split * part
        last = tl.minimum(first + part, size)
    return first, last
