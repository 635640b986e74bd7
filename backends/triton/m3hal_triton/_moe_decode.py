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
def _halves(codes, nibble):
    """fp16, 2**-6 of the numbers that the given nibbles stand for."""
    code = (codes >> (nibble * 4).to(tl.int64)[None, :]).to(tl.int32)
    return (((code & 8) << 4) | ((code & 7) << 2)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


def _instructions() -> str:
    """PTX for a word: the even and the odd codes of each half as E4M3 in four bytes, to fp16 by pairs."""
    lines = [".reg .b32 low, high, even, odd, sign;", ".reg .b16 a, b;", "mov.b64 {low, high}, $8;"]
    for first, word in ((0, "low"), (4, "high")):
        lines += [
            f"shl.b32 even, {word}, 2;",
            f"shl.b32 sign, {word}, 4;",
            "and.b32 even, even, 0x1C1C1C1C;",
            "lop3.b32 even, sign, 0x80808080, even, 0xEA;",  # (sign & mask) | even
            f"shr.u32 odd, {word}, 2;",
            "and.b32 odd, odd, 0x1C1C1C1C;",
            f"lop3.b32 odd, {word}, 0x80808080, odd, 0xEA;",
        ]
        for register, codes in ((first, "even"), (first + 2, "odd")):
            lines += [f"mov.b32 {{a, b}}, {codes};"]
            lines += [f"cvt.rn.f16x2.e4m3x2 ${register}, a;", f"cvt.rn.f16x2.e4m3x2 ${register + 1}, b;"]
    return "{ " + " ".join(lines) + " }"


UNPACK = tl.constexpr(_instructions())
OPERANDS = tl.constexpr(",".join(["=r"] * 8 + ["l"] * 16))


@triton.jit
def _e2m1(words, BN: tl.constexpr, BK: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    """2**-6 of the numbers of four-bit codes, [BN, BK] of int64 [BN, BK / 16]."""
    codes = _sixteen(words, BN, BK)
    column = tl.arange(0, BK) % 16
    if tl.float32 == COMPUTE:
        tile = _halves(codes, column).to(tl.float32)
    elif NATIVE:
        tile = tl.inline_asm_elementwise(
            UNPACK, OPERANDS, [codes], dtype=tl.float16, is_pure=True, pack=16
        )
    else:
        tile = _halves(codes, column // 8 * 8 + column % 4 * 2 + column % 8 // 4)
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


@triton.jit
def _scales(
    scales, base, k, size, BK: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """[BN, groups], what decoded codes are multiplied by."""
    GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    group = k // GROUP + tl.arange(0, BK // GROUP)[None, :]
    if EVEN:  # noqa: SIM108 (a load of Triton's is no expression of Python's)
        codes = tl.load(scales + group)
    else:
        codes = tl.load(scales + group, mask=group < size // GROUP, other=0)
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
    """[BN, BK] from column k on; columns beyond ``size`` are zeros. codes, scales: pointers to rows, [BN, 1]."""
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        word = k // 16 + tl.arange(0, BK // 16)[None, :]
        if EVEN:  # noqa: SIM108
            loaded = tl.load(codes + word)
        else:
            loaded = tl.load(codes + word, mask=word < size // 16, other=0)
        tile = _e2m1(loaded, BN, BK, COMPUTE, NATIVE)
    else:
        column = k + tl.arange(0, BK)[None, :]
        if EVEN:  # noqa: SIM108
            tile = tl.load(codes + column)
        else:
            tile = tl.load(codes + column, mask=column < size, other=0)
        if FORMAT == "mxfp8" or FORMAT == "fp8_e4m3":
            tile = tile.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(COMPUTE)
    if FORMAT == "mxfp8" or FORMAT == "mxfp4" or FORMAT == "nvfp4":
        step = _scales(scales, base, k, size, BK, FORMAT, COMPUTE, EVEN)
        GROUPS: tl.constexpr = step.shape[1]
        tile = tl.reshape(tl.reshape(tile, (BN, GROUPS, BK // GROUPS)) * step[:, :, None], (BN, BK))
    if tl.float16 == COMPUTE:
        tile = _in_order(tile, BN, BK)
    return tile
