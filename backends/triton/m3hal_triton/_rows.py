"""Rows of heads: how kernels that treat heads one by one share them out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def items(program, start, count, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Token int64, head and presence of a program's rows, [ROWS, 1], or [1, 1] where all rows share it.

    Programs take the heads of ``count`` tokens from token ``start`` on, token by token.
    """
    row = tl.arange(0, ROWS)[:, None]
    if HEADS % ROWS == 0:
        token, head = tl.zeros((1, 1), tl.int32) + program * ROWS // HEADS, program * ROWS % HEADS + row
    else:
        token, head = (program * ROWS + row) // HEADS, (program * ROWS + row) % HEADS
    return start + token.to(tl.int64), head, token < count
