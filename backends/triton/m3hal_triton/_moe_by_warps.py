"""A product of four-bit weights and one token, in which each warp loads weights of its own where the unit takes them.

A warp loads codes into the registers from which the matrix unit takes operands, a step ahead of their product, and
waits for no other: no shared memory and no barrier before the end. Warps of a program share its rows, and the columns
of a row: ALONG of them.

The unit's narrowest product has eight columns, so a step costs what decoding its codes does. Activations lie as they
are numbered: a lane takes the elements whose codes it has.

Triton gives lanes and warps to the axes of a load in the order of what it is told to be contiguous, so that is what
hints say, true or not, of all but the last axis.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._moe_decode import DEPTH, LIFT_E2M1, TALL

#: columns of a product
COLUMNS = tl.constexpr(8)
#: elements of a row that a lane takes in a step, and that four lanes take
OWN, STEP = tl.constexpr(32), tl.constexpr(128)


@triton.jit
def product(
    matrix, expert, first, token, size, height,
    ROWS: tl.constexpr, WARPS: tl.constexpr, ALONG: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """fp32 [WARPS, ROWS], rows of a matrix in pieces times a token, without the rows' factors; ALONG warps share them.

    expert: int64, or for each warp [1, WARPS, 1, 1]. first: a warp's first row [WARPS]. token: a pointer to activations
    in fp16, at a multiple of 16 bytes, or for each warp [1, WARPS, 1, 1, 1]. size, height: columns and rows of the
    matrix; ALONG steps divide the former. WAIT: for the kernel before, which writes the activations, but not before the
    first weights are asked for.
    """
    steps = size // (STEP * ALONG)
    k = tl.arange(0, WARPS) % ALONG * (steps * STEP)
    largest = 0
    if FORMAT == "mxfp4":
        largest = _largest(matrix[4] + expert * height, first, ROWS)
    total = tl.zeros((WARPS, ROWS, COLUMNS), tl.float32)
    words, powers = _stored(matrix, expert, first, k, ROWS, FORMAT)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    inputs = _inputs(token, k, size)
    once = tl.minimum(height, 1)
    for number in range(1, steps):
        following = k + number * STEP
        next_words, next_powers = _stored(matrix, expert, first, following, ROWS, FORMAT)
        next_inputs = _inputs(token, following, size)
        for _ in range(0, once):  # a loop, as ptxas would put the loads behind half of a product that it can see
            weights = _weights(words, powers, largest, ROWS, WARPS, FORMAT, NATIVE)
            total = tl.dot(weights, _activations(inputs, WARPS), total)
        words, powers, inputs = next_words, next_powers, next_inputs
    weights = _weights(words, powers, largest, ROWS, WARPS, FORMAT, NATIVE)
    total = tl.dot(weights, _activations(inputs, WARPS), total)
    return tl.sum(tl.where(tl.arange(0, COLUMNS)[None, None, :] == 0, total, 0.0), 2)


@triton.jit
def element_of(column):
    """int32: the element whose weights stand in a column of the order of :func:`_moe_decode.columns`."""
    return column // STEP * STEP + column % 8 // 2 * OWN + column % STEP // 8 * 2 + column % 2


@triton.jit
def _largest(base, first, ROWS: tl.constexpr):
    """int32 [ROWS / 8, WARPS, 8, 4]: the largest scale of each row."""
    rep = tl.arange(0, ROWS // 8)[:, None, None, None]
    lane = tl.arange(0, 8)[None, None, :, None]
    at = base + (first[None, :, None, None] + lane + tl.arange(0, 4)[None, None, None, :] * 0 + rep * 8)
    return tl.load(tl.multiple_of(tl.max_contiguous(at, [1, 2, 4, 8]), [1, 1, 1, 1]))


@triton.jit
def _stored(matrix, expert, first, k, ROWS: tl.constexpr, FORMAT: tl.constexpr):
    """A step's codes, from row ``first`` and column ``k`` of each warp on, and their scales.

    int32 [ROWS / 8, WARPS, 8, 16]; [ROWS / 8, WARPS, 8, 4] of a lane's 32 codes: two of NVFP4 as int16, one of MXFP4.
    """
    codes, code_strides, scales, scale_strides, _, _ = matrix
    rep = tl.arange(0, ROWS // 8)[:, None, None, None]
    lane = tl.arange(0, 8)[None, None, :, None]
    word = tl.arange(0, 16)[None, None, None, :]
    quarter = tl.arange(0, 4)[None, None, None, :]
    # a lane's address first, then what is the same for all lanes: an immediate of the load
    at = codes + expert * code_strides[0] + (_in_pieces(first, k, code_strides[1], 8) + (lane * (DEPTH // 8) + word))
    at = tl.max_contiguous(at + (rep * DEPTH).to(tl.int64), [1, 2, 4, 8])
    words = tl.load(tl.multiple_of(at, [1, 1, 1, 16]))
    base, tall = scales + expert * scale_strides[0], scale_strides[1]
    if FORMAT == "nvfp4":
        base, tall = base.to(tl.pointer_type(tl.int16)), tall // 2
    at = base + (_in_pieces(first, k, tall, 32) + (lane * (DEPTH // 32) + quarter))
    at = tl.max_contiguous(at + (rep * (DEPTH // 4)).to(tl.int64), [1, 2, 4, 8])
    return words, tl.load(tl.multiple_of(at, [1, 1, 1, 2 if FORMAT == "nvfp4" else 1]))


@triton.jit
def _in_pieces(first, k, tall, UNIT: tl.constexpr):
    """int64 [1, WARPS, 1, 1]: where a row and a column are, in units of UNIT columns. tall: of TALL rows."""
    WIDE: tl.constexpr = DEPTH // UNIT
    within = first % TALL * WIDE + k // DEPTH * (TALL * WIDE) + k % DEPTH // UNIT
    return ((first // TALL).to(tl.int64) * tall + within)[None, :, None, None]


@triton.jit
def _inputs(token, k, size):
    """fp16 [4, WARPS, 8, 4, 8]: a step's activations in the first column, and zeros."""
    rep = tl.arange(0, 4)[:, None, None, None, None]
    column = tl.arange(0, COLUMNS)[None, None, :, None, None]
    quarter = tl.arange(0, 4)[None, None, None, :, None]
    element = tl.arange(0, 8)[None, None, None, None, :]
    # as if columns were tokens: one that all of them have Triton would load once, and bring through shared memory
    at = token + column.to(tl.int64) * size + (k[None, :, None, None, None] + (quarter * OWN + rep * 8 + element))
    at = tl.multiple_of(tl.max_contiguous(at, [1, 2, 4, 8, 16]), [1, 1, 1, 1, 16])
    return tl.load(at, mask=column == 0, other=0.0)


@triton.jit
def _activations(inputs, WARPS: tl.constexpr):
    """fp16 [WARPS, STEP, COLUMNS] of what :func:`_inputs` returned, in the order of :func:`_weights`."""
    tile = tl.zeros((WARPS, STEP, COLUMNS), tl.float16)
    if tl.num_programs(0) > 0:
        split = tl.reshape(inputs, (4, WARPS, 8, 4, 4, 2))
        tile = tl.reshape(tl.permute(split, (1, 0, 4, 3, 5, 2)), (WARPS, STEP, COLUMNS))
    return tile


@triton.jit
def _weights(
    words, scales, largest, ROWS: tl.constexpr, WARPS: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr
):
    """fp16 [WARPS, ROWS, STEP] of what :func:`_stored` returned: columns of four lanes alternate by pairs.

    The branch is explained at hidden() of _decode.
    """
    tile = tl.zeros((WARPS, ROWS, STEP), tl.float16)
    if tl.num_programs(0) > 0:
        low, high = _pairs(scales, largest, FORMAT, NATIVE)
        step = tl.permute(tl.join(tl.join(low, low), tl.join(high, high)), (0, 1, 2, 3, 5, 4))
        numbers = _numbers(_eight(words), _eight(tl.reshape(step, (ROWS // 8, WARPS, 8, 16))), NATIVE)
        split = tl.reshape(numbers, (ROWS // 8, WARPS, 8, 4, 4, 4, 2))
        tile = tl.reshape(tl.permute(split, (1, 0, 2, 4, 5, 3, 6)), (WARPS, ROWS, STEP))
    return tile


@triton.jit
def _numbers(codes, steps, NATIVE: tl.constexpr):
    """fp16 of words of eight codes, each eight times in a row, and of what they are multiplied by."""
    if NATIVE:
        # called impure, as what doesn't change in a loop would be taken out of it
        tile = tl.inline_asm_elementwise(
            CODES, "=r,=r,=r,=r" + ",r" * 16, [codes, steps], dtype=tl.float16, is_pure=False, pack=8
        )
    else:
        # of a pair of neighbours, by its number: bits that are in place after a product
        pair = (tl.arange(0, 8) // 2)[None, None, None, None, :]
        wanted = tl.where(pair == 2, 0x40384038, tl.where(pair == 3, 0x20072007, -1))
        factor = tl.where(pair == 0, 1, tl.where(pair == 1, 8, tl.where(pair == 2, 66, 516)))
        bits = ((codes & wanted) * factor) & -0x71FF7200
        bits = (bits >> (tl.arange(0, 8) % 2 * 16)[None, None, None, None, :]).to(tl.int16)
        tile = bits.to(tl.float16, bitcast=True) * steps.to(tl.int16).to(tl.float16, bitcast=True)
    return tile


@triton.jit
def _eight(x):
    """Each element eight times in a row, along a new last axis; costs no instruction."""
    two = tl.join(x, x)
    four = tl.join(two, two)
    return tl.reshape(tl.join(four, four), x.shape + [8])  # noqa: RUF005 (Triton has no starred expressions)


@triton.jit
def _pairs(scales, largest, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """int32 words, of the first and of the last 16 codes: what they are multiplied by, in both halves."""
    if FORMAT == "nvfp4":
        codes = scales.to(tl.int32) & 0xFFFF
        if NATIVE:
            low, high = tl.inline_asm_elementwise(
                SCALES, "=r,=r,r", [codes], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
        else:
            low, high = _twice(_bits(codes & 255)), _twice(_bits(codes >> 8))
    else:
        low = _twice(tl.maximum(scales.to(tl.int32) + (15 + LIFT_E2M1) - largest, 0) << 10)
        high = low
    return low, high


@triton.jit
def _bits(code):
    scale = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _twice(bits):
    return bits | (bits << 16)


SCALES = tl.constexpr(
    "{ .reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 both, low;"
    " prmt.b32 $0, both, both, 0x1010; prmt.b32 $1, both, both, 0x3232; }"
)
#: of :data:`_moe_decode.PLACES`: its UNPACK, and the products with the scale
CODES = tl.constexpr(
    "{ .reg .b32 w, x, y, z;"
    " and.b32 x, $4, 0x8E008E00; mul.rn.f16x2 $0, x, $12;"
    " shl.b32 w, $4, 3; and.b32 y, w, 0x8E008E00; mul.rn.f16x2 $1, y, $12;"
    " and.b32 w, $4, 0x40384038; mul.lo.u32 w, w, 66; and.b32 w, w, 0x8E008E00; mul.rn.f16x2 $2, w, $12;"
    " and.b32 z, $4, 0x20072007; mul.lo.u32 z, z, 516; and.b32 z, z, 0x8E008E00; mul.rn.f16x2 $3, z, $12; }"
)
