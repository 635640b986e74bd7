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
