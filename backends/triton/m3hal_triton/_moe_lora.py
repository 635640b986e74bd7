"""Low-rank additions to the experts: a few rows at a time, beside products of full size."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _whose(adapters, adapter_stride, ids, id_strides, positions, pair, SLOTS: tl.constexpr):
    """Token int64, expert int64, adapter int64 and position int64 of a pair; a negative adapter: nothing to add."""
    token = pair // SLOTS
    expert = tl.load(ids + token * id_strides[0] + pair % SLOTS * id_strides[1])
    adapter = tl.where(expert >= 0, tl.load(adapters + token * adapter_stride), -1)
    position = tl.load(positions + pair, mask=adapter >= 0, other=0)
    return token, expert.to(tl.int64), adapter.to(tl.int64), position.to(tl.int64)


@triton.jit
def _products(matrix, strides, vector, mask, row, column, there, ROWS: tl.constexpr):
    """fp32 [ROWS]: rows of a matrix times a vector. there: rows that the matrix has."""
    at = matrix + (row * strides[2])[:, None] + (column * strides[3])[None, :]
    values = tl.load(at, mask=there[:, None] & mask[None, :], other=0.0).to(tl.float32)
    return tl.sum(values * vector[None, :], 1)


@triton.jit
def shrink(
    inputs,
    input_strides,
    features,  # which feature each pair of rows of w13 holds, where inputs are hidden activations; None: tokens
    a,  # [L, E, rank, size]
    a_strides,
    adapters,
    adapter_stride,
    ids,
    id_strides,
    positions,
    low,  # fp32 [pairs, rank]
    size,
    width,
    rank,
    factor: tl.constexpr,  # of the inputs
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """a times the input of a pair."""
    pair = tl.program_id(0).to(tl.int64)
    token, expert, adapter, position = _whose(adapters, adapter_stride, ids, id_strides, positions, pair, SLOTS)
    if adapter < 0:
        return
    r = tl.arange(0, RANK)
    total = tl.zeros((RANK,), tl.float32)
    matrix = a + adapter * a_strides[0] + expert * a_strides[1]
    source = inputs + token * input_strides[0]
    if features is not None:
        source = inputs + position * input_strides[0]
    for first in range(0, width, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        mask = k < width
        vector = tl.load(source + k * input_strides[1], mask=mask, other=0.0).to(tl.float32) * factor
        if features is not None:
            column = tl.load(features + k // 8 * 16 + k % 8, mask=mask, other=-1)
        else:
            column = k.to(tl.int64)
        mask = mask & (column >= 0) & (column < size)
        total += _products(matrix, a_strides, tl.where(mask, vector, 0.0), mask, r, column, r < rank, RANK)
    tl.store(low + pair * rank + r, total, mask=r < rank)


@triton.jit
def expand(
    low,  # fp32 [pairs, rank]
    b,  # [L, E, rows, rank]
    b_strides,
    scales,
    scale_stride,
    adapters,
    adapter_stride,
    ids,
    id_strides,
    positions,
    order,  # the row of b that each row of the sums takes, -1 for none; None: its own
    sums,  # fp32 [positions, height]
    rows,
    height,
    rank,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds b times what ``shrink`` left, times the adapter's scale."""
    pair = tl.program_id(0).to(tl.int64)
    _, expert, adapter, position = _whose(adapters, adapter_stride, ids, id_strides, positions, pair, SLOTS)
    if adapter < 0:
        return
    r = tl.arange(0, RANK)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = n.to(tl.int64)
    if order is not None:
        row = tl.load(order + n, mask=n < height, other=-1)
    there = (n < height) & (row >= 0) & (row < rows)
    vector = tl.load(low + pair * rank + r, mask=r < rank, other=0.0)
    matrix = b + adapter * b_strides[0] + expert * b_strides[1]
    delta = _products(matrix, b_strides, vector, r < rank, row, r, there, ROWS)
    delta *= tl.load(scales + adapter * scale_stride)
    at = sums + position * height + n
    tl.store(at, tl.load(at, mask=there, other=0.0) + delta, mask=there)
