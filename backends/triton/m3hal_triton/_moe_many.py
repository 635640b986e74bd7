"""w2's product for many tokens on Hopper, in Gluon (:mod:`_moe_direct`).

Its outputs wait for their sum in fp16, each token's 128 over a power of two of their own, found where a thread holds a
token's neighbouring rows: half the bytes of fp32 for what is at most 2**-12 of the largest of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from m3hal_triton._moe_direct import DEPTH, ROWS, TOKENS, product, rows_of, sums_of
from m3hal_triton._moe_weights import Matrix

#: [rows, tokens]: 16 bytes and more of a token's neighbouring rows
_OUT = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 8], [0, 1]))
_INFINITY = gl.constexpr(float("inf"))


@gluon.jit
def _item(items, total, item):
    """Expert, first position and tokens of a work item; no tokens beyond the last item."""
    real = item < gl.load(total)
    expert = gl.load(items + item * 4, mask=real, other=0)
    start = gl.load(items + item * 4 + 1, mask=real, other=0)
    return expert, start, gl.load(items + item * 4 + 2, mask=real, other=0)


@gluon.jit
def _times_factor(sums, factor, expert, tile, height, LAYOUT: gl.constexpr):
    row = gl.minimum(tile * ROWS + gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)), height - 1)
    return sums * gl.load(factor + expert * height + row)[:, None]


@gluon.jit
def _finish_down(
    sums, factor, expert, start, count, tile, parts, powers, rows,
    WIDTH: gl.constexpr, LOWER: gl.constexpr,
):  # fmt: skip
    """Stores WIDTH tokens' 128 outputs over a power of two, with which the largest lies below 2**15."""
    LAYOUT: gl.constexpr = sums_of(WIDTH)
    sums = _times_factor(sums, factor, expert, tile, rows, LAYOUT) * LOWER
    result = gl.convert_layout(sums, _OUT)
    n = tile * ROWS + gl.arange(0, 128, gl.SliceLayout(1, _OUT))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, _OUT))
    size = gl.abs(result)
    largest = gl.max(gl.where(size < _INFINITY, size, 0.0), 0)
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 20)
    result = result * ((268 - exponent) << 23).to(gl.float32, bitcast=True)[None, :]
    at = powers + ((start + column) * gl.cdiv(rows, ROWS) + tile)
    gl.store(at, ((exponent - 14) << 23).to(gl.float32, bitcast=True), mask=column < count)
    at = parts + (((start + column) * rows)[None, :] + n[:, None])
    gl.store(at, result.to(gl.float16), mask=(n < rows)[:, None] & (column < count)[None, :])


@gluon.jit
def _down_tile(
    hidden, matrix, expert, start, count, tile, parts, powers, size, inner, rows,
    LOWER: gl.constexpr, BT: gl.constexpr, BX: gl.constexpr, STAGES: gl.constexpr,
    MX: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    row = rows_of(matrix, expert, tile, rows, MX)
    offsets = (start + gl.arange(0, BT, gl.SliceLayout(1, TOKENS))) * inner
    more = (start + BT + gl.arange(0, BX if BX > 0 else 32, gl.SliceLayout(1, TOKENS))) * inner
    sums, extra = product(row, hidden, offsets, more, size, count, BT, BX, STAGES, MX, FETCH)
    _finish_down(
        sums, matrix[5], expert, start, count, tile, parts, powers, rows, BT, LOWER
    )  # fmt: skip
    if BX > 0:
        _finish_down(
            extra, matrix[5], expert, start + BT, count - BT, tile, parts, powers, rows, BX, LOWER
        )  # fmt: skip


@gluon.jit
def down_many(
    hidden, matrix, items, total, parts, powers, size, inner, rows,
    LOWER: gl.constexpr, BT: gl.constexpr, BX: gl.constexpr, STAGES: gl.constexpr,
    MX: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    """w2 times the hidden activations, in their order: parts fp16 [positions, rows], powers fp32 [positions, tiles]."""
    tiles = gl.cdiv(rows, ROWS)
    tile = gl.program_id(0) % tiles
    expert, start, count = _item(items, total, gl.program_id(0) // tiles)
    if count <= 0:
        return
    if count > BT:
        _down_tile(
            hidden, matrix, expert, start, count, tile, parts, powers, size, inner, rows,
            LOWER, BT, BX, STAGES, MX, FETCH,
        )  # fmt: skip
    elif count <= BT // 4:
        _down_tile(
            hidden, matrix, expert, start, count, tile, parts, powers, size, inner, rows,
            LOWER, BT // 4, 0, STAGES, MX, FETCH,
        )  # fmt: skip
    elif count <= BT // 2:
        _down_tile(
            hidden, matrix, expert, start, count, tile, parts, powers, size, inner, rows,
            LOWER, BT // 2, 0, STAGES, MX, FETCH,
        )  # fmt: skip
    else:
        _down_tile(
            hidden, matrix, expert, start, count, tile, parts, powers, size, inner, rows,
            LOWER, BT, 0, STAGES, MX, FETCH,
        )  # fmt: skip


#: tokens of a tile, and beside it; buffers; steps by which codes are fetched early
_TOKENS, _EXTRA, _STAGES, _FETCH = 256, 32, 6, 6
_INT32 = 2**31


def takes(batch: Any, matrix: Matrix) -> bool:
    """Whether a batch's product is this one: 8-bit codes beside fp16, whole steps, and offsets that 32 bits hold."""
    most = len(batch.hidden) * max(batch.hidden.shape[1], matrix.rows)
    is_stored = batch.format in ("mxfp8", "fp8_e4m3") and batch.lift and batch.powers is not None
    is_tuned = batch.is_hopper and (batch.tuning.tokens, batch.tuning.extra) == (_TOKENS, _EXTRA)
    return is_stored and is_tuned and most < _INT32 and matrix.size % (2 * DEPTH.value) == 0


def _words(matrix: Matrix) -> tuple[Any, ...]:
    codes, strides = matrix.codes.view(torch.int32), (0, 0) if matrix.scale is None else matrix.scale.stride()[:2]
    return codes, codes.stride()[:2], matrix.scale, strides, matrix.base, matrix.factor


def multiply(batch: Any, matrix: Matrix, lift: float) -> None:
    """Into ``batch.parts``."""
    down_many[(batch.count * triton.cdiv(matrix.rows, ROWS.value),)](
        batch.hidden, _words(matrix), batch.items, batch.total, batch.parts, batch.powers, matrix.size,
        batch.hidden.shape[1], matrix.rows, LOWER=1.0 / lift, BT=_TOKENS, BX=_EXTRA, STAGES=_STAGES,
        MX=matrix.base is not None, FETCH=_FETCH, num_warps=8,
    )  # fmt: skip
