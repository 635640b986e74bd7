"""Decodes the experts' stored weights in registers, where the matrix unit takes them.

FORMAT is a storage format by its name; COMPUTE the dtype of the products: the activations', or fp16 for stored weights
beside bf16 activations. E4M3 and E2M1 numbers become fp16 by one instruction for two; their block scales are taken
relative to the row's largest, and activations relative to their row's power of two (:mod:`_moe_align`), so nothing
leaves fp16's range, and what gets lost lies 2**-24 below the largest number of its row. Factors of a whole row multiply
sums in fp32.

A thread loads 16 neighbouring codes and multiplies them where they are, so an fp16 product walks K in the order of
:func:`columns`: its activations are stored in that order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._decode import _sixteen

#: columns that a permutation of K stays within
BLOCK = tl.constexpr(64)
#: rows of gate that alternate with rows of up: both lie in one thread's registers
ALTERNATE = tl.constexpr(8)
#: exponents of what multiplies decoded codes, for the row's largest block scale: 448 * 2**6 and 6 * 2**8 stay in range
LIFT_E4M3, LIFT_E2M1 = tl.constexpr(6), tl.constexpr(14)


def columns(format: str) -> list[int]:
    """The element of K that each column of a block of fp16 products of stored weights takes."""
    found = []
    for column in range(BLOCK.value):
        within = column // 8 * 2 + column % 2  # in the 16 of a thread
        if format in ("mxfp4", "nvfp4"):  # the order in which words are cheap to unpack
            within = within // 8 * 8 + within % 4 * 2 + within % 8 // 4
        found.append(column // 2 % 4 * 16 + within)
    return found


@triton.jit
def _in_order(tile, BN: tl.constexpr, BK: tl.constexpr):
    """Columns as four threads load them, 16 each, to the matrix unit's order; moves nothing between threads."""
    split = tl.reshape(tile, (BN, BK // 64, 4, 8, 2))
    return tl.reshape(tl.permute(split, (0, 1, 3, 2, 4)), (BN, BK))


@triton.jit
def _two(codes, HIGH: tl.constexpr, NATIVE: tl.constexpr):
    """The numbers of two E4M3 codes in one half of int32, fp16 [..., 2]."""
    if NATIVE:
        pair = tl.inline_asm_elementwise(
            CONVERT_HIGH if HIGH else CONVERT_LOW, "=r,r", [codes], dtype=tl.int32, is_pure=True, pack=1
        )
        low, high = pair.to(tl.int16).to(tl.float16, bitcast=True), (pair >> 16).to(tl.int16)
        high = high.to(tl.float16, bitcast=True)
    else:
        codes = codes >> 16 if HIGH else codes
        low = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = (codes >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tl.join(low, high)


_CONVERT = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, %s; }"
CONVERT_LOW, CONVERT_HIGH = tl.constexpr(_CONVERT % "low"), tl.constexpr(_CONVERT % "high")


@triton.jit
def _e2m1(words, BN: tl.constexpr, BK: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    """2**-6 of the numbers of four-bit codes, [BN, BK] of int64 [BN, BK / 16].

    For fp16, a code becomes an E4M3 code in the middle of a byte: seven shifts and logical instructions for eight, and
    a conversion for two. All on single words: what a thread's registers hold next to one another is not known here.
    """
    if tl.float32 == COMPUTE:
        nibble = (tl.arange(0, BK) % 16 * 4).to(tl.int64)[None, :]
        code = (_sixteen(words, BN, BK) >> nibble).to(tl.int32)
        code = (((code & 8) << 4) | ((code & 7) << 2)).to(tl.uint8)
        tile = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        half = tl.join(words.to(tl.int32), (words >> 32).to(tl.int32))
        even = ((half << 2) & 0x1C1C1C1C) | ((half << 4) & -0x7F7F7F80)
        odd = ((half >> 2) & 0x1C1C1C1C) | (half & -0x7F7F7F80)
        codes = tl.join(even, odd)
        low, high = _two(codes, False, NATIVE), _two(codes, True, NATIVE)
        tile = tl.reshape(tl.permute(tl.join(low, high), (0, 1, 2, 3, 5, 4)), (BN, BK))
    return tile


@triton.jit
def _e8m0(codes, base, LIFT: tl.constexpr, COMPUTE: tl.constexpr):
    """Powers of two: the scales themselves in fp32; in fp16 relative to 2**(base - 127 - LIFT)."""
    if tl.float32 == COMPUTE:
        power = tl.where(codes == 0, 1 << 22, codes.to(tl.int32) << 23)  # 0 is 2**-127, a subnormal number
        power = tl.where(codes == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)
    else:
        exponent = tl.maximum(codes.to(tl.int32) - base[:, None] + (127 + LIFT), 0)
        power = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float16)
    return power


@triton.constexpr_function
def scales_ahead(FORMAT, BK):
    """Whether a step's scales are too few bytes for an asynchronous copy: loops load them one step ahead, then."""
    return FORMAT in ("mxfp8", "mxfp4") and BK < 128


@triton.jit
def load_scales(scales, k, size, BK: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """uint8 [BN, groups], from column k on; 0 beyond ``size`` and in a format without."""
    codes = 0
    if FORMAT == "mxfp8" or FORMAT == "mxfp4" or FORMAT == "nvfp4":
        GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        group = k // GROUP + tl.arange(0, BK // GROUP)[None, :]
        if EVEN:  # noqa: SIM108 (a load of Triton's is no expression of Python's)
            codes = tl.load(scales + group)
        else:
            codes = tl.load(scales + group, mask=group < size // GROUP, other=0)
    return codes


@triton.jit
def _steps(codes, base, FORMAT: tl.constexpr, COMPUTE: tl.constexpr):
    """What decoded codes are multiplied by."""
    if FORMAT == "nvfp4":
        step = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        step = step.to(tl.float32) * 64.0 if tl.float32 == COMPUTE else (step * 128.0).to(tl.float16)
    elif FORMAT == "mxfp4":
        step = _e8m0(codes, base, LIFT_E2M1, COMPUTE)
        step = step * 64.0 if tl.float32 == COMPUTE else step
    else:
        step = _e8m0(codes, base, LIFT_E4M3, COMPUTE)
    return step


@triton.jit
def load_weights(
    codes, scales, base, k, size,
    BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """[BN, BK] from column k on; columns beyond ``size`` are zeros. codes: pointers to rows, [BN, 1].

    scales: what :func:`load_scales` returned. NATIVE: 0, not an NVIDIA GPU; 1, Hopper; 2, another.
    """
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        word = k // 16 + tl.arange(0, BK // 16)[None, :]
        if EVEN:  # noqa: SIM108
            loaded = tl.load(codes + word)
        else:
            loaded = tl.load(codes + word, mask=word < size // 16, other=0)
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
        step = _steps(scales, base, FORMAT, COMPUTE)
        GROUPS: tl.constexpr = step.shape[1]
        tile = tl.reshape(tl.reshape(tile, (BN, GROUPS, BK // GROUPS)) * step[:, :, None], (BN, BK))
    if tl.float16 == COMPUTE:
        tile = _in_order(tile, BN, BK)
        if NATIVE == 2:  # no instruction; triton 3.9 would seek the order in shared memory, and find no layout for it
            tile = tl.inline_asm_elementwise("", "=r,0", [tile], dtype=tl.float16, is_pure=True, pack=2)
    return tile
