"""Decodes the experts' stored weights in registers, where the matrix unit takes them.

FORMAT is a storage format by its name; COMPUTE the dtype of the products: the activations', or fp16 for stored weights
beside bf16 activations. E4M3 numbers become fp16 by one instruction for two; MX formats' block scales are taken
relative to the row's largest, and activations relative to their row's power of two (:mod:`_moe_align`), so nothing
leaves fp16's range, and what gets lost lies 2**-24 below the largest number of its row. Factors of a whole row multiply
sums in fp32.

An E2M1 code is 2**-14 of its number where its bits stand in an fp16 number, a subnormal one included. So words of eight
codes are packed in the order of :data:`PLACES`, from which nine instructions, and no conversion, make eight numbers.

A thread loads 16 bytes of neighbouring codes and multiplies them where they are, so an fp16 product walks K in the
order of :func:`columns`: its activations are stored in that order.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: rows and columns that lie in one piece, where block scales are and the matrix is large enough
TALL, DEPTH = tl.constexpr(128), tl.constexpr(256)
#: rows of gate that alternate with rows of up: both lie in one thread's registers
ALTERNATE = tl.constexpr(8)
#: exponents of what multiplies decoded codes, for the row's largest block scale: 448 * 2**6 stays in range, and 2**15
LIFT_E4M3, LIFT_E2M1 = tl.constexpr(6), tl.constexpr(15)
#: exponent of what E2M1 codes are decoded to, for 1
DOWN_E2M1 = tl.constexpr(-14)
#: bits that four codes have in a half of a word: sign, exponent, exponent, mantissa. The first has them where an fp16
#: number has; a shift brings the second there. The others' parts take two, by one product: nothing else is in between,
#: and nothing is carried
PLACES = ((15, 11, 10, 9), (12, 8, 7, 6), (14, 5, 4, 3), (13, 2, 1, 0))


def columns(format: str) -> list[int]:
    """The element of K that each column takes in fp16 products of stored weights; as many as return in an order."""
    own = 32 if format in ("mxfp4", "nvfp4") else 16  # of a thread: 16 bytes
    return [column // 2 % 4 * own + column // 8 * 2 + column % 2 for column in range(4 * own)]


@triton.jit
def _in_order(tile, BN: tl.constexpr, BK: tl.constexpr, OWN: tl.constexpr):
    """Columns as four threads load them, OWN each, to the matrix unit's order; moves nothing between threads."""
    tl.static_assert(BK % (4 * OWN) == 0)
    split = tl.reshape(tile, (BN, BK // (4 * OWN), 4, OWN // 2, 2))
    return tl.reshape(tl.permute(split, (0, 1, 3, 2, 4)), (BN, BK))


@triton.jit
def _e2m1(words, BN: tl.constexpr, BK: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    """Of the numbers of four-bit codes 2**-14, in fp32 2**-6, [BN, BK] of int32 [BN, BK / 8].

    All on single words: what a thread's registers hold next to one another is not known here.
    """
    if tl.float32 == COMPUTE:
        each = tl.reshape(tl.broadcast_to(words[:, :, None], (BN, BK // 8, 8)), (BN, BK))
        code = each >> (tl.arange(0, BK) % 8 * 4)[None, :]
        code = (((code & 8) << 4) | ((code & 7) << 2)).to(tl.uint8)
        tile = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        if NATIVE:
            first, second, third, fourth = tl.inline_asm_elementwise(
                UNPACK, "=r,=r,=r,=r,r", [words], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
            )
        else:
            first, second = words & -0x71FF7200, (words << 3) & -0x71FF7200
            third = ((words & 0x40384038) * 66) & -0x71FF7200
            fourth = ((words & 0x20072007) * 516) & -0x71FF7200
        pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
        low, high = pairs.to(tl.int16).to(tl.float16, bitcast=True), (pairs >> 16).to(tl.int16)
        tile = tl.reshape(tl.join(low, high.to(tl.float16, bitcast=True)), (BN, BK))
    return tile


UNPACK = tl.constexpr(
    "{ .reg .b32 w;"
    " and.b32 $0, $4, 0x8E008E00;"
    " shl.b32 w, $4, 3; and.b32 $1, w, 0x8E008E00;"
    " and.b32 w, $4, 0x40384038; mul.lo.u32 w, w, 66; and.b32 $2, w, 0x8E008E00;"
    " and.b32 w, $4, 0x20072007; mul.lo.u32 w, w, 516; and.b32 $3, w, 0x8E008E00; }"
)


@triton.jit
def _scaled(tile, step, NATIVE: tl.constexpr):
    """A product for two elements of a thread, whichever they are: of halves of a register Triton makes two."""
    tile, step = tl.broadcast(tile, step)
    if NATIVE and tl.float16 == tile.dtype:
        tile = tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [tile, step], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        tile = tile * step
    return tile


@triton.jit
def _e8m0(codes, base, LIFT: tl.constexpr, COMPUTE: tl.constexpr):
    """Powers of two: the scales themselves in fp32; in fp16 relative to 2**(base - 127 - LIFT)."""
    if tl.float32 == COMPUTE:
        power = tl.where(codes == 0, 1 << 22, codes.to(tl.int32) << 23)  # 0 is 2**-127, a subnormal number
        power = tl.where(codes == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)
    elif LIFT == 15:  # the bits of fp16 themselves, from 2**-14 on
        exponent = tl.maximum(codes.to(tl.int32) + ((15 + LIFT) - base[:, None]), 0)
        power = (exponent << 10).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        exponent = tl.maximum(codes.to(tl.int32) + ((127 + LIFT) - base[:, None]), 0)
        power = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float16)
    return power


@triton.constexpr_function
def scales_ahead(FORMAT, BK):
    """Whether a step's scales are too few bytes for an asynchronous copy: loops load them one step ahead, then."""
    return FORMAT in ("mxfp8", "mxfp4") and BK < 128


@triton.jit
def along(k, strides, UNIT: tl.constexpr, BK: tl.constexpr):
    """Where columns from k on start in a row, in units of UNIT columns. strides: of :func:`_moe_product.rows_of`."""
    at = k // UNIT
    if len(strides) > 2:
        tl.static_assert(BK <= DEPTH)
        piece = k // DEPTH
        at = piece * (TALL * DEPTH // UNIT) + (k - piece * DEPTH) // UNIT
    return at


@triton.jit
def load_scales(scales, strides, k, size, BK: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """From column k on, 0 beyond ``size``: uint8 [BN, BK / 32], of nvfp4 int16, with two; 0 in a format without.

    strides: of the matrix.
    """
    codes = 0
    if FORMAT == "mxfp8" or FORMAT == "mxfp4" or FORMAT == "nvfp4":
        group = tl.arange(0, BK // 32)[None, :]
        if FORMAT == "nvfp4":
            at = (scales + along(k, strides, 16, BK)).to(tl.pointer_type(tl.int16)) + group
        else:
            at = scales + along(k, strides, 32, BK) + group
        at = tl.multiple_of(at, [1, BK // (16 if FORMAT == "nvfp4" else 32)])
        if EVEN:  # noqa: SIM108 (a load of Triton's is no expression of Python's)
            codes = tl.load(at)
        else:
            codes = tl.load(at, mask=k // 32 + group < tl.cdiv(size, 32), other=0)
    return codes


@triton.jit
def _steps(codes, base, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    """What decoded codes are multiplied by, [BN, groups]."""
    if FORMAT == "nvfp4":
        if NATIVE:
            pair = tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }", "=r,r",
                [codes.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
            low = pair.to(tl.int16).to(tl.float16, bitcast=True)
            high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            low = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
            high = (codes >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        step = tl.reshape(tl.join(low, high), (codes.shape[0], 2 * codes.shape[1]))
        step = step.to(tl.float32) * 64.0 if tl.float32 == COMPUTE else step
    elif FORMAT == "mxfp4":
        step = _e8m0(codes, base, LIFT_E2M1, COMPUTE)
        step = step * 64.0 if tl.float32 == COMPUTE else step
    else:
        step = _e8m0(codes, base, LIFT_E4M3, COMPUTE)
    return step


@triton.jit
def load_weights(
    codes, strides, scales, base, k, size,
    BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """[BN, BK] from column k on; columns beyond ``size`` are zeros. codes: pointers to rows, [BN, 1].

    scales: what :func:`load_scales` returned. NATIVE: 0, not an NVIDIA GPU; 1, Hopper; 2, another.
    """
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        # not of 64 bits: as many words as scales would be loaded by as many bytes a thread, half a sector at a time
        word = tl.arange(0, BK // 8)[None, :]
        at = tl.multiple_of(codes + along(k, strides, 8, BK) + word, [1, BK // 2])
        if EVEN:  # noqa: SIM108
            loaded = tl.load(at)
        else:
            loaded = tl.load(at, mask=k // 8 + word < size // 8, other=0)
        tile = _e2m1(loaded, BN, BK, COMPUTE, NATIVE)
    else:
        column = k + tl.arange(0, BK)[None, :]
        if EVEN:
            tile = tl.load(codes + column)
        else:
            tile = tl.load(codes + column, mask=column < size, other=0.0 if tl.float8e4nv == COMPUTE else 0)
        if (FORMAT == "mxfp8" or FORMAT == "fp8_e4m3") and tl.float8e4nv != COMPUTE:
            tile = tile.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(COMPUTE)
    if FORMAT == "mxfp8" or FORMAT == "mxfp4" or FORMAT == "nvfp4":
        step = _steps(scales, base, FORMAT, COMPUTE, NATIVE)
        GROUPS: tl.constexpr = step.shape[1]
        grouped = tl.reshape(tile, (BN, GROUPS, BK // GROUPS))
        tile = tl.reshape(_scaled(grouped, step[:, :, None], NATIVE if FORMAT != "mxfp8" else 0), (BN, BK))
    if tl.float16 == COMPUTE:
        tile = _in_order(tile, BN, BK, 32 if FORMAT == "mxfp4" or FORMAT == "nvfp4" else 16)
        if NATIVE == 2:  # no instruction; triton 3.9 would seek the order in shared memory, and find no layout for it
            tile = tl.inline_asm_elementwise("", "=r,0", [tile], dtype=tl.float16, is_pure=True, pack=2)
    return tile
