"""The experts' two products for many tokens on Hopper, where both operands are as the matrix unit takes them.

Programs are as many as multiprocessors and take one tile after the other. A group of four warps fetches, a ring of
steps ahead: weights by the unit that copies tiles, and so the tokens of w2, which lie in the items' order; w13's row by
row, wherever they lie. Two others multiply the tile's 128 rows by the item's tokens; while these store what a tile came
to (:mod:`_moe_wide_ends`), copies of the next have begun. In Gluon, so neither the interpreter nor another GPU runs it.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from m3hal_triton._hopper import copy_bytes, copy_tile, next_slot, release
from m3hal_triton._launch import multiprocessors
from m3hal_triton._moe_weights import Matrix
from m3hal_triton._moe_wide_ends import ROWS, finish, scales, sums_of

_memory = gl.shared_memory_descriptor
# by the names of triton 3.9 and of 3.6
_taken_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret

#: tokens of a tile, of the narrow product beside it, and of what is copied together
TOKENS, EXTRA, PIECE = gl.constexpr(256), gl.constexpr(32), gl.constexpr(64)
#: bytes of a row in one step, and steps of the ring
LINE, STAGES = gl.constexpr(128), gl.constexpr(4)
#: registers of a thread that copies, of 168 for each of the three groups; those that multiply have the others
_FETCH, _FETCH_TILES = gl.constexpr(72), gl.constexpr(24)


@gluon.jit
def _item(items, index, tiles):
    """Tile, and its item's expert, first position and tokens."""
    record = items + index // tiles * 4
    return index % tiles, gl.load(record), gl.load(record + 1), gl.load(record + 2)


@gluon.jit
def _rows(order, start, count, stride, FIRST: gl.constexpr, N: gl.constexpr, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    """[N, 1]: where an item's tokens FIRST and following lie, and which of them it has."""
    token = FIRST + gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
    there = token < count
    row = gl.where(there, start + token, 0)
    if SLOTS > 0:
        row = gl.load(order + row, mask=there, other=0) // SLOTS
    return (row * stride)[:, None], there[:, None]


@gluon.jit
def _fetch(ring, matrix, inputs, stride, order, items, total, tiles, size, SLOTS: gl.constexpr):
    """The group that copies rows. Those that an item hasn't are zeros or, a whole piece of them, what was there."""
    weights, tokens, others, full, empty = ring
    BITS: gl.constexpr = inputs.dtype.element_ty.primitive_bitwidth
    DEPTH: gl.constexpr = LINE * 8 // BITS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT))[None, :]
    stage, phase = 0, 1
    for index in range(gl.program_id(0), gl.load(total) * tiles, gl.num_programs(0)):
        tile, expert, start, count = _item(items, index, tiles)
        row = (expert * tiles + tile) * ROWS
        row0, there0 = _rows(order, start, count, stride, 0, PIECE, SLOTS, LAYOUT)
        row1, there1 = _rows(order, start, count, stride, PIECE, PIECE, SLOTS, LAYOUT)
        row2, there2 = _rows(order, start, count, stride, 2 * PIECE, PIECE, SLOTS, LAYOUT)
        row3, there3 = _rows(order, start, count, stride, 3 * PIECE, PIECE, SLOTS, LAYOUT)
        row4, there4 = _rows(order, start, count, stride, TOKENS, EXTRA, SLOTS, LAYOUT)
        for k in range(0, size, DEPTH):
            came, into, at = full.index(stage), tokens.index(stage), inputs + k
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(came, ROWS * LINE)
            copy_tile(matrix, [row, k], came, weights.index(stage))
            copy_bytes(into.slice(0, PIECE), at + (row0 + column), mask=there0)
            if count > PIECE:
                copy_bytes(into.slice(PIECE, PIECE), at + (row1 + column), mask=there1)
            if count > 2 * PIECE:
                copy_bytes(into.slice(2 * PIECE, PIECE), at + (row2 + column), mask=there2)
            if count > 3 * PIECE:
                copy_bytes(into.slice(3 * PIECE, PIECE), at + (row3 + column), mask=there3)
            if count > TOKENS:
                copy_bytes(others.index(stage), at + (row4 + column), mask=there4)
            async_copy.mbarrier_arrive(came, increment_count=False)
            stage, phase = next_slot(stage, phase, STAGES)


@gluon.jit
def _bring(came, rows, k, row, into, there):
    """A piece of tokens that lie one after the other, where there are any; either way one arrival."""
    N: gl.constexpr = into.shape[0]
    if there:
        mbarrier.expect(came, N * LINE)
        copy_tile(rows, [row, k], came, into)
    else:
        mbarrier.arrive(came)


@gluon.jit
def _fetch_in_order(ring, matrix, rows, rest, items, total, tiles, size):
    """The group, of one warp, that copies tokens in the items' order; an item's last are followed by the next one's."""
    weights, tokens, others, full, empty = ring
    BITS: gl.constexpr = tokens.dtype.primitive_bitwidth
    DEPTH: gl.constexpr = LINE * 8 // BITS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(LINE, BITS, 2)
    pieces = _taken_as(tokens, tokens.dtype, [STAGES * (TOKENS // PIECE), PIECE, DEPTH], SHARED)
    stage, phase = 0, 1
    for index in range(gl.program_id(0), gl.load(total) * tiles, gl.num_programs(0)):
        tile, expert, start, count = _item(items, index, tiles)
        row = (expert * tiles + tile) * ROWS
        for k in range(0, size, DEPTH):
            came, first = full.index(stage), stage * (TOKENS // PIECE)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(came, (ROWS + PIECE) * LINE)
            copy_tile(matrix, [row, k], came, weights.index(stage))
            copy_tile(rows, [start, k], came, pieces.index(first))
            for piece in gl.static_range(1, TOKENS // PIECE):
                _bring(came, rows, k, start + piece * PIECE, pieces.index(first + piece), count > piece * PIECE)
            _bring(came, rest, k, start + TOKENS, others.index(stage), count > TOKENS)
            stage, phase = next_slot(stage, phase, STAGES)


@gluon.jit
def _sums(ring, stage, phase, steps, SLOTS: gl.constexpr, W: gl.constexpr, X: gl.constexpr):
    """fp32 [ROWS, W] of an item's first tokens and [ROWS, X] of those that follow, and where the ring is then."""
    weights, tokens, others, full, empty = ring
    BITS: gl.constexpr = tokens.dtype.primitive_bitwidth
    sums = gl.zeros([ROWS, W], gl.float32, sums_of(W, BITS))
    extra = 0.0
    if X > 0:
        extra = gl.zeros([ROWS, X], gl.float32, sums_of(X, BITS))
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if SLOTS > 0:
            fence_async_shared()  # tokens weren't copied by the unit that the matrix unit is in step with
        left, right = weights.index(stage), tokens.index(stage)
        sums = warpgroup_mma(left, right.slice(0, W).permute((1, 0)), sums, is_async=True)
        if X > 0:
            more = others.index(stage) if W == TOKENS else right.slice(W, X)
            extra = warpgroup_mma(left, more.permute((1, 0)), extra, is_async=True)
            sums, extra = warpgroup_mma_wait(2, deps=(sums, extra))
        else:
            sums = warpgroup_mma_wait(1, deps=(sums,))
        release(empty, stage, step > 0, STAGES)
        stage, phase = next_slot(stage, phase, STAGES)
    if X > 0:
        sums, extra = warpgroup_mma_wait(0, deps=(sums, extra))
    else:
        sums = warpgroup_mma_wait(0, deps=(sums,))
    release(empty, stage, True, STAGES)
    return sums, extra, stage, phase


@gluon.jit
def _tile(
    ring, stage, phase, steps, factor, given, out, height, where, SLOTS: gl.constexpr, W: gl.constexpr,
    X: gl.constexpr,
):  # fmt: skip
    """A tile, by a product of W tokens and, where there are more, one of X beside it."""
    BITS: gl.constexpr = ring[1].dtype.primitive_bitwidth
    count = where[3]
    scale, scale_of_extra = 1.0, 1.0
    if SLOTS > 0 and factor is not None:
        scale = scales(given, where[2], count, 0, W, SLOTS)
        if X > 0:
            scale_of_extra = scales(given, where[2], count, W, X, SLOTS)
    if X == 0:
        sums, _, stage, phase = _sums(ring, stage, phase, steps, SLOTS, W, 0)
        finish(sums, scale, factor, given, out, height, where, 0, SLOTS, BITS)
    else:
        extra = gl.zeros([ROWS, X], gl.float32, sums_of(X, BITS))
        if count > W:
            sums, extra, stage, phase = _sums(ring, stage, phase, steps, SLOTS, W, X)
        else:
            sums, _, stage, phase = _sums(ring, stage, phase, steps, SLOTS, W, 0)
        finish(sums, scale, factor, given, out, height, where, 0, SLOTS, BITS)
        if count > W:
            finish(extra, scale_of_extra, factor, given, out, height, where, W, SLOTS, BITS)
    return stage, phase


@gluon.jit
def _multiply(ring, factor, given, out, items, total, height, steps, SLOTS: gl.constexpr):
    """The groups that multiply: by about as many columns as an item has tokens."""
    tiles = height // ROWS
    stage, phase = 0, 0
    for index in range(gl.program_id(0), gl.load(total) * tiles, gl.num_programs(0)):
        where = _item(items, index, tiles)
        if where[3] > 3 * PIECE:
            stage, phase = _tile(ring, stage, phase, steps, factor, given, out, height, where, SLOTS, TOKENS, EXTRA)
        elif where[3] > PIECE:
            stage, phase = _tile(ring, stage, phase, steps, factor, given, out, height, where, SLOTS, 2 * PIECE, PIECE)
        else:
            stage, phase = _tile(ring, stage, phase, steps, factor, given, out, height, where, SLOTS, PIECE, 0)


@gluon.jit(do_not_specialize_on_alignment=["factor", "items", "total"])
def products_wide(
    inputs,  # [T, size], or [positions, size]
    stride,  # of their rows
    matrix,  # tiles [ROWS, 128 bytes] of [experts * height, size]
    factor,  # fp32 [experts * height], what sums are multiplied by; or None
    items,
    total,
    order,
    given,  # factors of x, order, and alpha, beta and limit; or factors of hidden
    rows,  # tiles [PIECE, 128 bytes] and [EXTRA, 128 bytes] of inputs that lie in the items' order; or None
    rest,
    out,  # hidden; or parts in fp16, and powers fp32 [positions, height / ROWS]
    height,  # rows of the matrix
    size,
    SLOTS: gl.constexpr,  # of a token, whose inputs are found by ``order``; 0: they lie in the items' order
):
    """w13 and its activation, or w2."""
    dtype: gl.constexpr = inputs.dtype.element_ty
    BITS: gl.constexpr = dtype.primitive_bitwidth
    DEPTH: gl.constexpr = LINE * 8 // BITS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(LINE, BITS, 2)
    weights = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], SHARED)
    tokens = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, DEPTH], SHARED)
    others = gl.allocate_shared_memory(dtype, [STAGES, EXTRA, DEPTH], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # each thread that copies, and how many bytes of weights come; or one for each piece of tokens
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=129 if SLOTS > 0 else 5)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    ring = (weights, tokens, others, full, empty)
    tiles, steps = height // ROWS, size // DEPTH
    if SLOTS > 0:
        gl.warp_specialize(
            [
                (_multiply, (ring, factor, given, out, items, total, height, steps, SLOTS)),
                (_fetch, (ring, matrix, inputs, stride, order, items, total, tiles, size, SLOTS)),
            ],
            [4],
            [_FETCH],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (ring, factor, given, out, items, total, height, steps, SLOTS)),
                (_fetch_in_order, (ring, matrix, rows, rest, items, total, tiles, size)),
            ],
            [1],
            [_FETCH_TILES],
        )


#: numbers of an array that kernels address by 32 bits
_ADDRESSED = 2**31


def takes(batch: Any, matrix: Matrix, inputs: torch.Tensor) -> bool:
    """Whether a product is one of these: bf16 or E4M3 on both sides, whole tiles, rows that copies of 16 bytes divide.

    Triton knows of a stride only whether 16 *numbers* divide it: what is less sure it would copy number by number.
    """
    width = inputs.element_size()
    is_tuned = batch.is_hopper and (batch.tuning.tokens, batch.tuning.extra) == (TOKENS.value, EXTRA.value)
    is_alike = matrix.codes.element_size() == width and not batch.lift and batch.items is not None
    is_whole = matrix.rows % ROWS.value == 0 and matrix.size * width % LINE.value == 0
    is_aligned = inputs.stride(1) == 1 and inputs.stride(0) % 16 == 0 and inputs.data_ptr() % 16 == 0
    is_plain = is_alike and is_whole and is_aligned and width <= 2
    most = max(len(inputs) * inputs.stride(0), len(batch.hidden) * matrix.rows // ROWS.value)
    return is_tuned and is_plain and batch.powers is not None and most < _ADDRESSED


def up(batch: Any, matrix: Matrix, numbers: tuple[float, float, float]) -> None:
    """w13 and its activation, into ``batch.hidden``."""
    given = batch.x_factor, batch.order, numbers
    _launch(batch, matrix, batch.given, batch.order, given, batch.hidden, batch.slots)


def down(batch: Any, matrix: Matrix) -> None:
    """w2, into ``batch.parts`` and ``batch.powers``."""
    _launch(batch, matrix, batch.hidden, None, batch.hidden_factor, (batch.parts, batch.powers), 0)


def _launch(
    batch: Any, matrix: Matrix, inputs: torch.Tensor, order: torch.Tensor | None, given: Any, out: Any, slots: int
) -> None:
    bits, width = 8 * inputs.element_size(), matrix.codes.shape[2]
    experts = len(matrix.codes) + (batch.shared >= 0)  # a shared one's rows follow the others', beyond this tensor
    block, layout = [ROWS.value, LINE.value * 8 // bits], gl.NVMMASharedLayout(LINE.value, bits, 2)
    codes = matrix.codes.view(inputs.dtype)
    tiles = TensorDescriptor(codes, [experts * matrix.rows, width], [width, 1], block, layout)
    rows = rest = None
    if slots == 0:
        rows, rest = (TensorDescriptor.from_tensor(inputs, [n.value, block[1]], layout) for n in (PIECE, EXTRA))
    programs = min(batch.count * (matrix.rows // ROWS.value), multiprocessors(inputs.device))
    products_wide[(programs,)](
        inputs, inputs.stride(0), tiles, matrix.factor, batch.items, batch.total, order, given, rows, rest, out,
        matrix.rows, matrix.size, SLOTS=slots, num_warps=8,
    )  # fmt: skip
