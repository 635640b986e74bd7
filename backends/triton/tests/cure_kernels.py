"""Kernels that show the interpreter's faults; conftest imports them while triton's functions are interpreted."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, out, SIZE: tl.constexpr):
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = i * SIZE + j
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


@triton.jit
def arithmetic(a, b, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, tl.where(x > y, x * y + x, x - y))


@triton.jit
def scaled_product(
    a, a_scales, b, b_scales, out, SIZE: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr, CODE: tl.constexpr
):
    """a, b: SIZE rows of BYTES, with GROUPS scales each."""
    row = tl.arange(0, SIZE)[:, None]
    codes, scales = row * BYTES + tl.arange(0, BYTES)[None, :], row * GROUPS + tl.arange(0, GROUPS)[None, :]
    left, right = tl.load(a + codes), tl.trans(tl.load(b + codes))
    product = tl.dot_scaled(left, tl.load(a_scales + scales), CODE, right, tl.load(b_scales + scales), CODE)
    tl.store(out + row * SIZE + tl.arange(0, SIZE)[None, :], product)


@triton.jit
def _later(a, b):
    return tl.where(b != b, a, tl.maximum(a, b) + 0.5 * tl.minimum(a, b))


@triton.jit
def _pair(a, i, b, j):
    return tl.where(b > a, b, a), tl.where(b > a, j, i)


@triton.jit
def combined(x, out, index, AXIS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEEP: tl.constexpr):
    """By functions of one's own: of numbers, and of numbers with their places."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tile = tl.load(x + row * COLUMNS + column)
    found = tl.reduce(tile, AXIS, _later, keep_dims=KEEP)
    _, place = tl.reduce((tile, row * COLUMNS + column), AXIS, _pair, keep_dims=KEEP)
    if KEEP:
        found, place = (
            tl.reshape(found, (COLUMNS if AXIS == 0 else ROWS,)),
            tl.reshape(place, (COLUMNS if AXIS == 0 else ROWS,)),
        )
    at = tl.arange(0, COLUMNS if AXIS == 0 else ROWS)
    tl.store(out + at, found)
    tl.store(index + at, place)


@triton.jit
def shifted(x, out, by, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """out[i] = x[i + by], of which the last may lie outside."""
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i + by, mask=(i + by < SIZE) | (not MASKED), other=0.0))
