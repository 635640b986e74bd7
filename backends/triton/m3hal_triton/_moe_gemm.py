"""The experts' two kernels, w13 with its activation and w2: the loop of :mod:`_moe_product` and what comes of sums."""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._moe_product import item_of, product, rows_of, span, tokens_of

_ARRAYS = ["items", "total", "order", "x_factor", "ready"]
#: tokens of a tile from which on items of half and a quarter of them have products of their own; of one for halves
WIDE, HALVED = tl.constexpr(128), tl.constexpr(32)


@triton.jit
def activated(gate, up, alpha, beta, limit):
    """Comparisons with NaN are false, so a NaN stays."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return tl.div_rn(gate, 1.0 + tl.exp(-alpha * gate)) * (up + beta)


@triton.jit
def _finish_up(
    sums, x_factor, order, start, count, n, tile, split, hidden, raw, positions, inner, numbers,
    SLOTS: tl.constexpr, RAISE: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Stores WIDTH tokens: activated, or the sums themselves where there is more to add."""
    column = tl.arange(0, WIDTH)
    there = column < count
    if x_factor is not None:  # whose they are is asked again: it would have occupied registers in the loop
        whose = tokens_of(order, start + column, there, SLOTS, SORTED)
        sums = sums * tl.load(x_factor + whose, mask=there, other=0.0)[None, :]
    if raw is not None:
        at = raw + ((split.to(tl.int64) * positions + start + column) * (2 * inner))[None, :] + n[:, None]
        tl.store(at, sums, mask=(n < 2 * inner)[:, None] & there[None, :])
    else:
        alpha, beta, limit = numbers
        HALF: tl.constexpr = BN // 2
        both = tl.permute(tl.reshape(sums, (BN // 16, 2, 8, WIDTH)), (0, 2, 3, 1))
        gate, above = tl.split(tl.reshape(both, (HALF, WIDTH, 2)))
        result = activated(gate, above, alpha, beta, limit) * RAISE
        feature = tile * HALF + tl.arange(0, HALF)
        at = hidden + ((start + column) * inner)[None, :] + feature[:, None]
        tl.store(at, result.to(hidden.dtype.element_ty), mask=(feature < inner)[:, None] & there[None, :])


@triton.jit
def _up_tile(
    x, x_strides, x_factor, row, order, start, count, n, tile, split, hidden, raw, positions, size, width, inner,
    numbers, SLOTS: tl.constexpr, RAISE: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr,
    BK: tl.constexpr, SPLITS: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, SORTED: tl.constexpr,
    EVEN: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # columns beyond the last token are copies of it
    position = start + tl.minimum(tl.arange(0, BT), count - 1)
    inputs = x + (tokens_of(order, position, position >= 0, SLOTS, SORTED) * x_strides[0])[:, None]
    more = inputs
    if BX > 0:
        position = start + tl.minimum(BT + tl.arange(0, BX), count - 1)
        more = x + (tokens_of(order, position, position >= 0, SLOTS, SORTED) * x_strides[0])[:, None]
    there = (tl.arange(0, BT) < count)[:, None]
    first, last = span(split, size, BK, SPLITS)
    total, extra = product(
        row, inputs, more, there, x_strides[1], first, last, size, width,
        BN, BT, BX, BK, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, MASKED,
    )  # fmt: skip
    _finish_up(
        total * row[3], x_factor, order, start, count, n, tile, split, hidden, raw, positions, inner, numbers,
        SLOTS, RAISE, BN, BT, SORTED,
    )  # fmt: skip
    if BX > 0:
        _finish_up(
            extra * row[3], x_factor, order, start + BT, count - BT, n, tile, split, hidden, raw, positions, inner,
            numbers, SLOTS, RAISE, BN, BX, SORTED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "positions"], do_not_specialize_on_alignment=_ARRAYS)
def up(
    x,
    x_strides,
    x_factor,  # fp32 [T], or None
    matrix,
    items,
    total,
    order,
    hidden,  # [positions, inner]
    raw,  # None, or fp32 [SPLITS, positions, 2 * inner] for the sums
    tokens,
    positions,
    size,  # columns of the matrix
    width,  # columns of x: more where it was filled up
    inner,  # features of hidden, a multiple of 64; gate and up rows alternate in the matrix
    numbers,  # alpha, beta, limit
    SLOTS: tl.constexpr,
    RAISE: tl.constexpr,  # what hidden is multiplied by
    BN: tl.constexpr,
    BT: tl.constexpr,
    BX: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    SORTED: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,  # tokens that are not there are not read
    EARLY: tl.constexpr,
    ready=None,  # int32, for each item how many programs have stored what is theirs; None: nobody asks
):
    """The activation of w13 times the tokens, in the order of their experts."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(2 * inner, BN)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles % SPLITS
    item = tl.program_id(0) // (tiles * SPLITS)
    expert, start, count = item_of(items, total, tokens, item, BT + BX, SORTED)
    if count <= 0:
        return
    if EARLY:  # not before a program knows whether it has an item: the kernels after it may end before it
        tl.extra.cuda.gdc_launch_dependents()
    n = tile * BN + tl.arange(0, BN)
    row = rows_of(matrix, expert, n, 2 * inner)
    # one of them runs: an expert that few chose is not multiplied with a tile of many
    if BX > 0 and count > BT:
        _up_tile(
            x, x_strides, x_factor, row, order, start, count, n, tile, split, hidden, raw, positions, size, width,
            inner, numbers, SLOTS, RAISE, BN, BT, BX, BK, SPLITS, FORMAT, COMPUTE, SORTED, EVEN, NATIVE, PRECISION,
            STAGES, MASKED, EARLY,
        )  # fmt: skip
    elif BT >= WIDE and count <= BT // 4:
        _up_tile(
            x, x_strides, x_factor, row, order, start, count, n, tile, split, hidden, raw, positions, size, width,
            inner, numbers, SLOTS, RAISE, BN, BT // 4, 0, BK, SPLITS, FORMAT, COMPUTE, SORTED, EVEN, NATIVE, PRECISION,
            STAGES, MASKED, EARLY,
        )  # fmt: skip
    elif (BT >= WIDE or BT == HALVED) and count <= BT // 2:
        _up_tile(
            x, x_strides, x_factor, row, order, start, count, n, tile, split, hidden, raw, positions, size, width,
            inner, numbers, SLOTS, RAISE, BN, BT // 2, 0, BK, SPLITS, FORMAT, COMPUTE, SORTED, EVEN, NATIVE, PRECISION,
            STAGES, MASKED, EARLY,
        )  # fmt: skip
    else:
        _up_tile(
            x, x_strides, x_factor, row, order, start, count, n, tile, split, hidden, raw, positions, size, width,
            inner, numbers, SLOTS, RAISE, BN, BT, 0, BK, SPLITS, FORMAT, COMPUTE, SORTED, EVEN, NATIVE, PRECISION,
            STAGES, MASKED, EARLY,
        )  # fmt: skip
    if ready is not None:
        tl.debug_barrier()
        tl.atomic_add(ready + item, 1, sem="release")


@triton.jit
def _seen(counter):
    """What it counts; what was stored before it was raised can be read."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def finish_down(sums, factor, parts, start, count, n, rows, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    there = column < count
    if factor is not None:
        sums = sums * tl.load(factor + start + column, mask=there, other=0.0)[None, :]
    at = parts + ((start + column) * rows)[None, :] + n[:, None]
    tl.store(at, sums.to(parts.dtype.element_ty), mask=(n < rows)[:, None] & there[None, :])


@triton.jit
def _finish_half(sums, factor, parts, powers, start, count, n, tile, rows, BN: tl.constexpr, WIDTH: tl.constexpr):
    """Stores WIDTH tokens in fp16, each token's BN over a power of two with which the largest lies below 2**15."""
    column = tl.arange(0, WIDTH)
    there = column < count
    if factor is not None:
        sums = sums * tl.load(factor + start + column, mask=there, other=0.0)[None, :]
    size = tl.abs(sums)
    largest = tl.max(tl.where(size < float("inf"), size, 0.0), 0)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 20)
    sums = sums * ((268 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]
    power = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    tl.store(powers + (start + column) * tl.cdiv(rows, BN) + tile, power, mask=there)
    at = parts + ((start + column) * rows)[None, :] + n[:, None]
    tl.store(at, sums.to(tl.float16), mask=(n < rows)[:, None] & there[None, :])


@triton.jit
def _down_tile(
    hidden, factor, row, parts, powers, start, count, n, tile, split, size, inner, rows,
    LOWER: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    FORMAT: tl.constexpr, COMPUTE: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    inputs = hidden + ((start + tl.minimum(tl.arange(0, BT), count - 1)) * inner)[:, None]
    more = inputs
    if BX > 0:
        more = hidden + ((start + tl.minimum(BT + tl.arange(0, BX), count - 1)) * inner)[:, None]
    there = (tl.arange(0, BT) < count)[:, None]
    first, last = span(split, size, BK, SPLITS)
    total, extra = product(
        row, inputs, more, there, 1, first, last, size, inner,
        BN, BT, BX, BK, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, MASKED,
    )  # fmt: skip
    if powers is not None:
        _finish_half(total * (row[3] * LOWER), factor, parts, powers, start, count, n, tile, rows, BN, BT)
        if BX > 0:
            _finish_half(extra * (row[3] * LOWER), factor, parts, powers, start + BT, count - BT, n, tile, rows, BN, BX)
    else:
        finish_down(total * (row[3] * LOWER), factor, parts, start, count, n, rows, BT)
        if BX > 0:
            finish_down(extra * (row[3] * LOWER), factor, parts, start + BT, count - BT, n, rows, BX)


@triton.jit(
    do_not_specialize=["tokens", "positions", "arrivals"],
    do_not_specialize_on_alignment=["items", "total", "factor", "ready"],
)
def down(
    hidden,  # [positions, inner]
    factor,  # fp32 [positions], or None
    matrix,
    items,
    total,
    parts,  # [SPLITS, positions, rows]
    powers,  # fp32 [positions, tiles], what each tile of parts in fp16 is to be multiplied by; or None
    tokens,
    positions,
    size,  # features that w2 has
    inner,
    rows,
    LOWER: tl.constexpr,  # 1 / RAISE
    BN: tl.constexpr,
    BT: tl.constexpr,
    BX: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    SORTED: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,  # tokens that are not there are not read
    EARLY: tl.constexpr,
    ready=None,  # of up: what is waited for, of one item; None: all that up does
    arrivals=0,  # how many programs of up an item has
):
    """w2 times the hidden activations, in their order.

    With ``ready``, programs run beside the last ones of :func:`up`. All of those have their places on the GPU before
    the first of these is launched, so whoever waits here waits for a program that runs.
    """
    tiles = tl.cdiv(rows, BN)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles % SPLITS
    item = tl.program_id(0) // (tiles * SPLITS)
    expert, start, count = item_of(items, total, tokens, item, BT + BX, SORTED)
    arrived = _seen(ready + item) if ready is not None else 0
    n = tile * BN + tl.arange(0, BN)
    row = rows_of(matrix, expert, n, rows)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if ready is None:
            tl.extra.cuda.gdc_wait()
    if count <= 0:
        return
    if ready is not None:
        while arrived < arrivals:
            arrived = _seen(ready + item)
    into = parts + split.to(tl.int64) * positions * rows
    if BX > 0 and count > BT:
        _down_tile(
            hidden, factor, row, into, powers, start, count, n, tile, split, size, inner, rows,
            LOWER, BN, BT, BX, BK, SPLITS, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, MASKED, EARLY,
        )  # fmt: skip
    elif BT >= WIDE and count <= BT // 4:
        _down_tile(
            hidden, factor, row, into, powers, start, count, n, tile, split, size, inner, rows,
            LOWER, BN, BT // 4, 0, BK, SPLITS, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, MASKED, EARLY,
        )  # fmt: skip
    elif (BT >= WIDE or BT == HALVED) and count <= BT // 2:
        _down_tile(
            hidden, factor, row, into, powers, start, count, n, tile, split, size, inner, rows,
            LOWER, BN, BT // 2, 0, BK, SPLITS, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, MASKED, EARLY,
        )  # fmt: skip
    else:
        _down_tile(
            hidden, factor, row, into, powers, start, count, n, tile, split, size, inner, rows,
            LOWER, BN, BT, 0, BK, SPLITS, FORMAT, COMPUTE, EVEN, NATIVE, PRECISION, STAGES, MASKED, EARLY,
        )  # fmt: skip
