"""The experts' products where the matrix unit itself takes blocks of codes and their scales.

Weights are the left operand, whose 128 rows fill Blackwell's unit with any number of tokens. Tokens and hidden
activations are blocks of the same group of columns, rounded here; hidden ones from the fp32 sums, in the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._encode import _scaled as divided
from m3hal_triton._encode import e4m3_number, mxfp4, nvfp4
from m3hal_triton._moe_gemm import activated, finish_down
from m3hal_triton._moe_product import item_of, rows_of, tokens_of
from m3hal_triton.quantize import mxfp8

_ARRAYS = ["items", "total", "order"]


@triton.jit
def _rounded(x, multiplier, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of codes and of scales of fp32 [R, W], in groups of columns."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    groups = tl.reshape(divided(x, multiplier), (ROWS, WIDTH // GROUP, GROUP))
    if FORMAT == "mxfp8":
        code, scale = mxfp8(groups, NATIVE)
        code = tl.reshape(code, (ROWS, WIDTH))
    else:
        code, scale = nvfp4(groups) if FORMAT == "nvfp4" else mxfp4(groups)
        even, odd = tl.split(tl.reshape(code, (ROWS, WIDTH // 2, 2)))
        code = even | (odd << 4)
    return code.to(tl.uint8), scale.to(tl.uint8)


@triton.jit
def round_tokens(
    x, x_strides, codes, scales, multiplier, width, COLUMNS: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr
):
    """x [T, width] to rows of codes and of scales. multiplier: pointer to a global scale, or None."""
    GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    PACK: tl.constexpr = 1 if FORMAT == "mxfp8" else 2
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    number = tl.load(x + row * x_strides[0] + column * x_strides[1], mask=column < width, other=0.0).to(tl.float32)
    code, scale = _rounded(number[None, :], multiplier, FORMAT, NATIVE)
    byte = first // PACK + tl.arange(0, COLUMNS // PACK)
    group = first // GROUP + tl.arange(0, COLUMNS // GROUP)
    tl.store(codes + row * (width // PACK) + byte, tl.ravel(code), mask=byte < width // PACK)
    tl.store(scales + row * (width // GROUP) + group, tl.ravel(scale), mask=group < width // GROUP)


@triton.jit
def _blocks(codes, scales, k, size, BK: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """Bytes [R, BK or BK / 2] and scales [R, BK / GROUP] from column k on; zeros beyond ``size``, scales of zero too.

    codes, scales: pointers to rows, [R, 1].
    """
    GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    PACK: tl.constexpr = 1 if FORMAT == "mxfp8" else 2
    byte, group = k // PACK + tl.arange(0, BK // PACK)[None, :], k // GROUP + tl.arange(0, BK // GROUP)[None, :]
    if EVEN:
        code, scale = tl.load(codes + byte), tl.load(scales + group)
    else:
        code = tl.load(codes + byte, mask=byte < size // PACK, other=0.0)
        scale = tl.load(scales + group, mask=group < size // GROUP, other=0)
    if FORMAT == "nvfp4":
        scale = scale.to(tl.float8e4nv, bitcast=True)
    return code, scale


@triton.jit
def _numbers(code, scale):
    """bf16 [R, W] of NVFP4's blocks, exact, for matrix units that don't take them."""
    ROWS: tl.constexpr = code.shape[0]
    GROUPS: tl.constexpr = scale.shape[1]
    pair = tl.join(code & 15, code >> 4).to(tl.int32)
    size, byte = pair & 7, scale.to(tl.uint8, bitcast=True).to(tl.int32)
    doubled = tl.where(size < 2, size, (2 | size & 1) << (tl.maximum(size >> 1, 1) - 1))
    number = tl.where(pair > 7, -0.5, 0.5) * doubled.to(tl.float32)
    factor = tl.where(byte == 127, float("nan"), e4m3_number(byte & 127))  # a scale is never negative
    return tl.reshape(tl.reshape(number, (ROWS, GROUPS, 16)) * factor[:, :, None], (ROWS, GROUPS * 16)).to(tl.bfloat16)


@triton.jit
def _product(
    codes, scales, inputs, input_scales, size,
    BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [BN, BT]: rows of weights times rows of activations, all of them [.., 1] pointers to their first bytes."""
    LEFT: tl.constexpr = "e4m3" if FORMAT == "mxfp8" else "e2m1"
    RIGHT: tl.constexpr = "e4m3" if ACTIVATION == "mxfp8" else "e2m1"
    total = tl.zeros((BN, BT), tl.float32)
    for k in tl.range(0, size, BK, num_stages=STAGES):
        code, scale = _blocks(codes, scales, k, size, BK, FORMAT, EVEN)
        given, factor = _blocks(inputs, input_scales, k, size, BK, ACTIVATION, EVEN)
        if SCALED:
            total = tl.dot_scaled(code, scale, LEFT, tl.trans(given), factor, RIGHT, total)
        else:
            total = tl.dot(_numbers(code, scale), tl.trans(_numbers(given, factor)), total)
    return total


@triton.jit(do_not_specialize_on_alignment=_ARRAYS)
def up_scaled(
    x,  # uint8 [T, H or H / 2], rows of codes
    x_scales,  # uint8 [T, H / GROUP]
    x_multiplier,  # fp32, or None
    matrix,
    items,
    total,
    order,
    hidden,  # uint8 [positions, inner or inner / 2]
    hidden_scales,  # uint8 [positions, inner / GROUP]
    hidden_multiplier,
    size,  # columns of the matrix
    inner,  # features of hidden, a multiple of 64; gate and up rows alternate in the matrix
    numbers,  # alpha, beta, limit
    SLOTS: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The activation of w13 times the tokens, in the order of their experts and rounded."""
    GROUP: tl.constexpr = 16 if ACTIVATION == "nvfp4" else 32
    PACK: tl.constexpr = 1 if ACTIVATION == "mxfp8" else 2
    HALF: tl.constexpr = BN // 2
    tiles = tl.cdiv(2 * inner, BN)
    tile = tl.program_id(0) % tiles
    expert, start, count = item_of(items, total, 0, tl.program_id(0) // tiles, BT, True)
    if count <= 0:
        return
    codes, scales, _, factor, _ = rows_of(matrix, expert, tile * BN + tl.arange(0, BN), 2 * inner)
    # columns beyond the last token are copies of it
    position = start + tl.minimum(tl.arange(0, BT), count - 1)
    token = tokens_of(order, position, position >= 0, SLOTS, True)[:, None]
    sums = _product(
        codes, scales, x + token * (size // PACK), x_scales + token * (size // GROUP), size,
        BN, BT, BK, FORMAT, ACTIVATION, EVEN, SCALED, STAGES,
    ) * factor  # fmt: skip
    if x_multiplier is not None:
        sums *= tl.load(x_multiplier)
    alpha, beta, limit = numbers
    both = tl.permute(tl.reshape(sums, (BN // 16, 2, 8, BT)), (3, 0, 2, 1))
    gate, above = tl.split(tl.reshape(both, (BT, HALF, 2)))
    code, scale = _rounded(activated(gate, above, alpha, beta, limit), hidden_multiplier, ACTIVATION, NATIVE)
    column = tl.arange(0, BT)
    row, there = (start + column)[:, None], (column < count)[:, None]
    byte = tile * (HALF // PACK) + tl.arange(0, HALF // PACK)[None, :]
    group = tile * (HALF // GROUP) + tl.arange(0, HALF // GROUP)[None, :]
    tl.store(hidden + row * (inner // PACK) + byte, code.to(hidden.dtype.element_ty, bitcast=True), mask=there)
    tl.store(hidden_scales + row * (inner // GROUP) + group, scale, mask=there)


@triton.jit(do_not_specialize_on_alignment=["items", "total"])
def down_scaled(
    hidden,
    hidden_scales,
    hidden_multiplier,
    matrix,
    items,
    total,
    parts,  # fp32 [positions, rows]
    size,  # features that w2 has
    inner,
    rows,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """w2 times the hidden activations, in their order."""
    GROUP: tl.constexpr = 16 if ACTIVATION == "nvfp4" else 32
    PACK: tl.constexpr = 1 if ACTIVATION == "mxfp8" else 2
    tiles = tl.cdiv(rows, BN)
    tile = tl.program_id(0) % tiles
    expert, start, count = item_of(items, total, 0, tl.program_id(0) // tiles, BT, True)
    if count <= 0:
        return
    n = tile * BN + tl.arange(0, BN)
    codes, scales, _, factor, _ = rows_of(matrix, expert, n, rows)
    position = (start + tl.minimum(tl.arange(0, BT), count - 1))[:, None]
    sums = _product(
        codes, scales, hidden + position * (inner // PACK), hidden_scales + position * (inner // GROUP), size,
        BN, BT, BK, FORMAT, ACTIVATION, EVEN, SCALED, STAGES,
    ) * factor  # fmt: skip
    if hidden_multiplier is not None:
        sums *= tl.load(hidden_multiplier)
    finish_down(sums, None, parts, start, count, n, rows, BT)
