"""The experts' products of 8-bit codes for many tokens on Hopper, in Gluon: one group of warps copies, two multiply.

A tile is 128 rows of a weight matrix times the tokens of a work item. One group of warps brings the tokens to shared
memory, a ring of steps ahead; each of two others multiplies 64 rows, whose codes it loads into the registers where the
matrix unit takes them (:mod:`_moe_decode`). Those two never meet: while one converts, or stores what a tile came to,
the other's products run. Programs are as many as multiprocessors and take one tile after the other, so that copies of
a tile begin under the products of the one before.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from m3hal_triton._hopper import all_warps
from m3hal_triton._launch import multiprocessors
from m3hal_triton._moe_ring import (
    DEPTH,
    HALF,
    LINES,
    ROWS,
    TOKENS,
    WORDS,
    ended,
    fetch,
    leave,
    product,
    rows_of,
    sums_of,
)
from m3hal_triton._moe_weights import Matrix

#: [features or rows, tokens]: 16 bytes and more of a token's neighbours
_HIDDEN = gl.constexpr(gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1]))
_PARTS = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
_INFINITY = gl.constexpr(float("inf"))


@gluon.constexpr_function
def _features_of(WIDTH):
    """The layout of activations [32, WIDTH]: a row of gate and one of up lie in one thread."""
    own, width = [[0, 1]], 8
    while width < WIDTH:
        own.append([0, width])
        width *= 2
    return gl.DistributedLinearLayout(own, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, WIDTH])


@gluon.jit
def _item(items, item):
    """Expert, first position and tokens of a work item."""
    return gl.load(items + item * 4), gl.load(items + item * 4 + 1), gl.load(items + item * 4 + 2)


@gluon.jit
def _finish_up(sums, scale, start, count, feature, hidden, inner, numbers, WIDTH: gl.constexpr, RAISE: gl.constexpr):
    """Stores WIDTH tokens' activations of 32 features from ``feature`` on. scale: of each token."""
    alpha, beta, limit = numbers
    FEATURES: gl.constexpr = _features_of(WIDTH)
    both = gl.permute(gl.reshape(sums, [4, 2, 8, WIDTH]), [0, 2, 3, 1])
    gate, up = gl.split(gl.reshape(both, [32, WIDTH, 2]))
    gate, up = gl.convert_layout(gate, FEATURES), gl.convert_layout(up, FEATURES)
    scale = gl.convert_layout(scale, gl.SliceLayout(0, FEATURES))[None, :]
    gate, up = gate * scale, up * scale
    # comparisons with NaN are false, so a NaN stays
    gate = gl.where(gate > limit, limit, gate)
    up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    result = gate / (1.0 + gl.exp(-alpha * gate)) * (up + beta) * RAISE
    result = gl.convert_layout(result.to(gl.float16), _HIDDEN)
    row = feature + gl.arange(0, 32, gl.SliceLayout(1, _HIDDEN))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, _HIDDEN))
    at = hidden + (((start + column) * inner)[None, :] + row[:, None])
    gl.store(at, result, mask=(row < inner)[:, None] & (column < count)[None, :])


@gluon.jit
def _finish_down(sums, start, count, n, parts, powers, rows, WIDTH: gl.constexpr):
    """Stores WIDTH tokens' 64 outputs over a power of two, with which the largest lies below 2**15."""
    result = gl.convert_layout(sums, _PARTS)
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, _PARTS))
    size = gl.abs(result)
    largest = gl.max(gl.where(size < _INFINITY, size, 0.0), 0)
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 20)
    result = result * ((268 - exponent) << 23).to(gl.float32, bitcast=True)[None, :]
    at = powers + ((start + column) * (rows // HALF) + n // HALF)
    gl.store(at, ((exponent - 14) << 23).to(gl.float32, bitcast=True), mask=column < count)
    row = n + gl.arange(0, HALF, gl.SliceLayout(1, _PARTS))
    at = parts + (((start + column) * rows)[None, :] + row[:, None])
    gl.store(at, result.to(gl.float16), mask=(row < rows)[:, None] & (column < count)[None, :])


@gluon.jit
def _halves(sums, WIDTH: gl.constexpr):
    """The sums of the first and of the second half of WIDTH tokens; moves nothing."""
    LAYOUT: gl.constexpr = sums_of(WIDTH // 2)
    low, high = gl.split(gl.permute(gl.reshape(sums, [64, 2, WIDTH // 2]), [0, 2, 1]))
    return gl.convert_layout(low, LAYOUT), gl.convert_layout(high, LAYOUT)


@gluon.jit
def _finish(
    sums, scales, start, count, n, height, numbers, out,
    FIRST: gl.constexpr, WIDTH: gl.constexpr, UP: gl.constexpr, RAISE: gl.constexpr,
):  # fmt: skip
    """Tokens FIRST to FIRST + WIDTH, 64 at a time, as more would take registers that there are not."""
    if WIDTH > 64:
        HALF_WIDTH: gl.constexpr = WIDTH // 2
        low, high = _halves(sums, WIDTH)
        _finish(low, scales, start, count, n, height, numbers, out, FIRST, HALF_WIDTH, UP, RAISE)
        _finish(high, scales, start, count, n, height, numbers, out, FIRST + HALF_WIDTH, HALF_WIDTH, UP, RAISE)
    elif UP:
        scale = scales.slice(FIRST, WIDTH).load(gl.SliceLayout(0, _features_of(WIDTH)))
        _finish_up(
            sums, scale, start + FIRST, count - FIRST, n // 2, out[0], height // 2, numbers, WIDTH, RAISE
        )  # fmt: skip
    else:
        _finish_down(sums, start + FIRST, count - FIRST, n, out[0], out[1], height, WIDTH)


@gluon.jit
def _scale_of(given, start, count, WIDTH: gl.constexpr, SLOTS: gl.constexpr):
    """What each token's sums are multiplied by."""
    column = gl.arange(0, WIDTH, LINES)
    token = gl.load(given[1] + (start + column), mask=column < count, other=0) // SLOTS
    return gl.load(given[0] + token)


@gluon.jit
def _multiply(
    ring, scales, matrix, items, total, height, given, out, part: gl.constexpr,
    SIZE: gl.constexpr, BT: gl.constexpr, BX: gl.constexpr, STAGES: gl.constexpr, MX: gl.constexpr, UP: gl.constexpr,
    SLOTS: gl.constexpr, FACTOR: gl.constexpr,
):  # fmt: skip
    """A group's half of each tile's rows."""
    tiles = height // ROWS
    slot, phase = 0, 0
    for index in range(gl.program_id(0), gl.load(total) * tiles, gl.num_programs(0)):
        tile = index % tiles
        expert, start, count = _item(items, index // tiles)
        row = rows_of(matrix, expert, tile, height, SIZE, part, MX)
        n = tile * ROWS + part * HALF
        factor = gl.load(matrix[3] + (expert * height + n + gl.arange(0, HALF, gl.SliceLayout(1, sums_of(BT)))))
        if not UP:
            factor = factor * FACTOR
        if count > BT:
            sums, extra, slot, phase = product(row, ring, slot, phase, SIZE // DEPTH, BT, BX, STAGES, MX)
            if UP:  # asked for under the last products
                scale = _scale_of(given, start, count, BT, SLOTS)
                more = _scale_of(given, start + BT, count - BT, BX, SLOTS)
            sums, extra = ended(sums, extra, ring, slot, BX, STAGES)
            if UP:
                scales.slice(0, BT).store(scale)
                scales.slice(BT, BX).store(more)
            sums = sums * factor[:, None]
            extra = extra * gl.convert_layout(factor, gl.SliceLayout(1, sums_of(BX)))[:, None]
            _finish(sums, scales, start, count, n, height, given[2], out, 0, BT, UP, FACTOR)
            _finish(extra, scales, start, count, n, height, given[2], out, BT, BX, UP, FACTOR)
        else:
            sums, none, slot, phase = product(row, ring, slot, phase, SIZE // DEPTH, BT, 0, STAGES, MX)
            if UP:
                scale = _scale_of(given, start, count, BT, SLOTS)
            sums, _ = ended(sums, none, ring, slot, 0, STAGES)
            if UP:
                scales.slice(0, BT).store(scale)
            _finish(sums * factor[:, None], scales, start, count, n, height, given[2], out, 0, BT, UP, FACTOR)
    leave()


@gluon.jit
def _offsets(order, start, count, first, stride, WIDTH: gl.constexpr, UP: gl.constexpr, SLOTS: gl.constexpr):
    """int32, where tokens ``first`` and following of an item lie."""
    position = start + gl.minimum(first + gl.arange(0, WIDTH, gl.SliceLayout(1, TOKENS)), count - 1)
    if UP:
        position = gl.load(order + position) // SLOTS
    return position * stride


@gluon.jit
def _bring(
    ring, matrix, items, total, height, given, inputs, stride,
    SIZE: gl.constexpr, BT: gl.constexpr, BX: gl.constexpr, STAGES: gl.constexpr, UP: gl.constexpr, SLOTS: gl.constexpr,
    FETCH: gl.constexpr,
):  # fmt: skip
    """The group that copies."""
    tiles = height // ROWS
    slot, phase = 0, 0
    steps: gl.constexpr = SIZE // DEPTH
    for index in range(gl.program_id(0), gl.load(total) * tiles, gl.num_programs(0)):
        tile = index % tiles
        expert, start, count = _item(items, index // tiles)
        line = matrix[0] + (expert * tiles + tile).to(gl.int64) * (SIZE // 4 * ROWS)
        line = line + gl.arange(0, 128, LINES) * (SIZE // 4)
        offsets = _offsets(given[1], start, count, 0, stride, BT, UP, SLOTS)
        if count > BT:
            extra = _offsets(given[1], start, count, BT, stride, BX, UP, SLOTS)
            for step in range(steps):
                ahead = line + gl.minimum(step + FETCH, steps - 1) * WORDS
                slot, phase = fetch(ring, slot, phase, inputs, offsets, extra, step, count, ahead, BT, BX, STAGES)
        else:
            for step in range(steps):
                ahead = line + gl.minimum(step + FETCH, steps - 1) * WORDS
                slot, phase = fetch(ring, slot, phase, inputs, offsets, offsets, step, count, ahead, BT, 0, STAGES)
    async_copy.commit_group()
    async_copy.wait_group(0)
    leave()


@gluon.jit
def products(
    inputs,  # fp16 [T, ...], or [positions, ...]
    stride,
    matrix,
    items,
    total,
    height,  # rows of the matrix
    x_factor,
    order,
    numbers,
    out,  # hidden; or parts and powers
    SLOTS: gl.constexpr,
    FACTOR: gl.constexpr,
    SIZE: gl.constexpr,  # columns of the matrix
    BT: gl.constexpr,
    BX: gl.constexpr,
    STAGES: gl.constexpr,
    MX: gl.constexpr,
    UP: gl.constexpr,
    FETCH: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """w13 and its activation, or w2, with ``inputs`` in the order of the items' positions."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    buffers = gl.allocate_shared_memory(gl.float16, [STAGES, BT, DEPTH], SHARED)
    others = gl.allocate_shared_memory(gl.float16, [STAGES, BX, DEPTH], SHARED)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = gl.allocate_shared_memory(gl.float32, [2, 2 * BT if UP else 64], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)  # by each thread that copies
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    all_warps()
    ring = (buffers, others, full, free)
    given = (x_factor, order, numbers)
    upper, lower = scales.index(0), scales.index(1)
    gl.warp_specialize(
        [
            (_multiply, (
                ring, upper, matrix, items, total, height, given, out,
                0, SIZE, BT, BX, STAGES, MX, UP, SLOTS, FACTOR,
            )),
            (_multiply, (
                ring, lower, matrix, items, total, height, given, out,
                1, SIZE, BT, BX, STAGES, MX, UP, SLOTS, FACTOR,
            )),
            (_bring, (
                ring, matrix, items, total, height, given, inputs, stride,
                SIZE, BT, BX, STAGES, UP, SLOTS, FETCH,
            )),
        ],
        [4, 4],
        [COMPUTE_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


#: tokens of a tile, and beside it; steps of the ring; steps by which the cache is asked for codes before tokens are
_TOKENS, _EXTRA, _STAGES, _FETCH = 256, 32, 5, 4
#: registers of a thread that multiplies, and of one that copies: 168 for each of the three groups in all
_COMPUTE, _COPY = 232, 40
_INT32 = 2**31


def takes(batch: Any, matrix: Matrix) -> bool:
    """Whether a batch's product is one of these: 8-bit codes beside fp16, whole tiles and pieces, 32-bit offsets."""
    most = max(len(batch.hidden) * max(batch.hidden.shape[1], matrix.rows), batch.given.numel())
    is_stored = batch.format in ("mxfp8", "fp8_e4m3") and batch.lift and batch.items is not None
    is_tuned = batch.is_hopper and (batch.tuning.tokens, batch.tuning.extra) == (_TOKENS, _EXTRA)
    is_whole = matrix.rows % ROWS.value == 0 and matrix.size % (4 * DEPTH.value) == 0
    return is_stored and is_tuned and is_whole and most < _INT32


def takes_down(batch: Any, matrix: Matrix) -> bool:
    """The same of w2's, whose outputs wait in fp16."""
    return batch.powers is not None and takes(batch, matrix)


def _launch(batch: Any, matrix: Matrix, inputs: torch.Tensor, out: tuple[torch.Tensor, ...], **more: Any) -> None:
    programs = min(batch.count * (matrix.rows // ROWS.value), multiprocessors(inputs.device))
    same = {"BT": _TOKENS, "BX": _EXTRA, "STAGES": _STAGES, "FETCH": _FETCH, "SLOTS": batch.slots}
    same |= {"COMPUTE_REGISTERS": _COMPUTE, "COPY_REGISTERS": _COPY, "MX": matrix.base is not None}
    products[(programs,)](
        inputs, inputs.stride(0), (matrix.codes.view(torch.int32), matrix.scale, matrix.base, matrix.factor),
        batch.items, batch.total, matrix.rows, out=out, SIZE=matrix.size, num_warps=4, **same, **more,
    )  # fmt: skip


def up(batch: Any, matrix: Matrix, numbers: tuple[float, float, float], lift: float) -> None:
    """w13 and its activation, into ``batch.hidden``."""
    more = {"x_factor": batch.x_factor, "order": batch.order, "numbers": numbers, "FACTOR": lift, "UP": True}
    _launch(batch, matrix, batch.given, (batch.hidden,), **more)


def down(batch: Any, matrix: Matrix, lift: float) -> None:
    """w2, into ``batch.parts`` and ``batch.powers``."""
    more = {"x_factor": None, "order": None, "numbers": None, "FACTOR": 1.0 / lift, "UP": False}
    _launch(batch, matrix, batch.hidden, (batch.parts, batch.powers), **more)
