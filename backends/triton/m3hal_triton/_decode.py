"""Loads stored keys and values as numbers: the one place where kernels read bytes of a cache, in every format.

What is loaded is exact: E4M3 has 4 significant bits, and E2M1 times an E4M3 scale has 6, which fp16 and bf16 hold.
Factors common to a whole cache, its global scale and a power of two, are left to the caller (:func:`factor`), who
applies them to sums in fp32. FORMAT is a cache format by its name, COMPUTE the dtype of the products.

Four-bit codes are loaded in 64-bit words, and a word becomes 16 columns in the order in which the two halves of a
register are cheap to fill: :func:`dims` names the element that a column holds. Queries are loaded in that order and
outputs stored in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3hal.layouts import PagedCache

#: formats that these functions read
FORMATS = ("float32", "bfloat16", "fp8_e4m3", "nvfp4", "mxfp4")
#: codes in a 64-bit word
WORD = tl.constexpr(16)
#: an E2M1 code in the middle of an E4M3 code stands for 2**-6 of its number; with scales times 2**7, which stay in
#: fp16's range, products are twice what is stored
LIFT = tl.constexpr(128.0)


def compute_dtype(format: str, dtype: str) -> tl.dtype:
    """Of a decode's products: the activations' dtype, or fp16 where stored numbers reach it by one instruction."""
    if dtype == "float32":
        return tl.float32
    return tl.float16 if format in ("fp8_e4m3", "nvfp4") else tl.bfloat16


def native(device: torch.device, dim: int, dtype: str) -> bool:
    """Whether words of four-bit codes are converted by instructions of NVIDIA GPUs, not by Triton's operations.

    An instruction sequence takes a word to sixteen neighbouring elements, so it needs an order of elements in which a
    thread holds whole words. That is so for bf16 activations and vectors of 128 elements, and tested for these.
    """
    return device.type == "cuda" and torch.version.hip is None and dim == 128 and dtype == "bfloat16"


def check_alignment(cache: PagedCache) -> None:
    """Raises ValueError for four-bit codes whose words would lie off their own size."""
    if cache.layout.format in ("nvfp4", "mxfp4") and (cache.buf.data_ptr() | cache.buf.stride(0)) % 8:
        raise ValueError(
            f"{cache.layout.format} codes are read in words of 8 bytes; this buffer starts or steps off a multiple of 8"
        )


@triton.jit
def dims(DIM: tl.constexpr, FORMAT: tl.constexpr):
    """int32 [DIM]: the element of a vector that each column of :func:`load_rows` holds."""
    column = tl.arange(0, DIM)
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        column = column // 8 * 8 + column % 4 * 2 + column % 8 // 4
    return column


@triton.jit
def key_dims(DIM: tl.constexpr, FORMAT: tl.constexpr, SMALL: tl.constexpr):
    """int32 [DIM]: the element of a vector that each row of :func:`load_keys` holds.

    SMALL: for a product of fewer than 64 rows. Its unit takes keys from registers: four lanes hold a key, as four lanes
    load it, and when pairs of their quarters alternate, the loaded numbers are operands where they are.
    """
    column = tl.arange(0, DIM)
    if SMALL and (FORMAT == "nvfp4" or FORMAT == "mxfp4"):
        column = column // 2 % 4 * (DIM // 4) + column // 8 * 2 + column % 2
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        column = column // 8 * 8 + column % 4 * 2 + column % 8 // 4
    return column


@triton.jit
def factor(global_scale, FORMAT: tl.constexpr):
    """fp32: loaded numbers times this are the stored ones."""
    value = 0.5 if FORMAT == "nvfp4" else 1.0
    if global_scale is not None:
        value = value * tl.load(global_scale)
    return value


@triton.jit
def load_keys(
    cache, part, page, head, offset, there, scales,
    DIM: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr,
    SMALL: tl.constexpr,
):  # fmt: skip
    """[DIM, KEYS]. part: of :mod:`_pages`; page: int64, one or [KEYS]; offset in the page, there: [KEYS].

    scales: what :func:`load_scales` returned. A key that is not there is zero, whatever its bytes hold; there may be
    None.
    """
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        words = _words(cache, part, page, head, offset, there, DIM // WORD)
        tile = _unpacked(words, scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE)
        if SMALL:
            quarters = tl.permute(tl.reshape(tile, (KEYS, 4, DIM // 8, 2)), (0, 2, 1, 3))
            tile = tl.reshape(quarters, (KEYS, DIM))
        tile = tl.trans(tile)
    else:
        at = cache + (page * part.page + head * part.head + part.codes) + offset * part.token
        at = at[None, :] + tl.arange(0, DIM)[:, None] * part.column
        if there is None:
            tile = _numbers(tl.load(at), FORMAT, COMPUTE)
        else:
            tile = _numbers(tl.load(at, mask=there[None, :], other=0), FORMAT, COMPUTE)
    return tile


@triton.jit
def load_rows(
    cache, part, page, head, offset, there, scales,
    DIM: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """[KEYS, DIM]; arguments as in :func:`load_keys`."""
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        words = _words(cache, part, page, head, offset, there, DIM // WORD)
        tile = _unpacked(words, scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE)
    else:
        at = cache + (page * part.page + head * part.head + part.codes) + offset * part.token
        tile = _numbers(_masked(at[:, None] + tl.arange(0, DIM)[None, :] * part.column, there), FORMAT, COMPUTE)
    return tile


@triton.jit
def load_scales(
    cache, part, page, head, offset, there, DIM: tl.constexpr, FORMAT: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """uint8 [KEYS, DIM / 16]: the scale of each word of codes; 0 in a format without scales.

    Loops load them one step ahead of their codes: too few bytes for an asynchronous copy, so nothing else hides them.
    """
    scales = 0
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        word = tl.arange(0, DIM // WORD)
        base = cache + (page * part.page + head * part.scale_head + part.scales)
        if FORMAT == "mxfp4":
            at = (base + offset * (DIM // 32))[:, None] + word[None, :] // 2
        elif VALUES:
            # said to be neighbours along words, at odd addresses: as neighbours along tokens, which they are, they
            # would be read in another order than the codes, and exchanged between threads
            at = (base + offset // 4 * (DIM // 4) + offset % 4)[:, None] + word[None, :] * 4
            at = tl.multiple_of(tl.max_contiguous(at, [1, 2]), [1, 1])
        else:
            at = tl.max_contiguous((base + offset * (DIM // WORD))[:, None] + word[None, :], [1, 2])
        scales = _masked(at, there)
    return scales


@triton.jit
def _masked(at, there):
    """A load [KEYS, n]."""
    if there is None:  # noqa: SIM108 (a load of Triton's is no expression of Python's)
        loaded = tl.load(at)
    else:
        loaded = tl.load(at, mask=there[:, None], other=0)
    return loaded


@triton.jit
def natural(tile, DIM: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr):
    """A tile [KEYS, DIM] with its columns in the order of the elements."""
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        words = tl.permute(tl.reshape(tile, (KEYS, DIM // 8, 2, 4)), (0, 1, 3, 2))
        tile = tl.reshape(words, (KEYS, DIM))
    return tile


@triton.jit
def packed(tile, DIM: tl.constexpr, ROWS: tl.constexpr, FORMAT: tl.constexpr):
    """A tile [ROWS, DIM] with its columns in the order of :func:`dims`: what :func:`natural` undoes."""
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        words = tl.permute(tl.reshape(tile, (ROWS, DIM // 8, 4, 2)), (0, 1, 3, 2))
        tile = tl.reshape(words, (ROWS, DIM))
    return tile


@triton.jit
def as_queries(q, COMPUTE: tl.constexpr, AXIS: tl.constexpr):
    """Queries in the dtype of the products, and the fp32 factor of each, a vector along the axis that is not AXIS.

    fp16 has bf16's digits but not its range, so a query is brought to [1, 2) by a power of two. That is exact but for
    elements under 2**-14 of the largest, whose lost digits are far below the rounding of the sum.
    """
    if tl.float16 == COMPUTE:
        wide = q.to(tl.float32)
        exponent = (tl.max(tl.abs(wide), AXIS).to(tl.int32, bitcast=True) >> 23) & 255
        # zero, subnormal, infinite and NaN queries are taken as they are
        exponent = tl.where((exponent > 1) & (exponent < 253), exponent, 127)
        down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        queries = (wide * tl.expand_dims(down, AXIS)).to(tl.float16)
        up = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        queries = q.to(COMPUTE)
        up = tl.full((q.shape[1 - AXIS],), 1.0, tl.float32)
    return queries, up


@triton.jit
def _numbers(tile, FORMAT: tl.constexpr, COMPUTE: tl.constexpr):
    if FORMAT == "fp8_e4m3":
        tile = tile.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if tl.float16 != COMPUTE:
            tile = tile.to(tl.float32)
    return tile.to(COMPUTE)


@triton.jit
def _words(cache, part, page, head, offset, there, COUNT: tl.constexpr):
    """int64 [KEYS, COUNT]."""
    at = cache + (page * part.page + head * part.head + part.codes) + offset * part.token
    at = at.to(tl.pointer_type(tl.int64))
    return _masked(at[:, None] + tl.arange(0, COUNT)[None, :], there)


@triton.jit
def hidden(KEYS: tl.constexpr, DIM: tl.constexpr):
    """What a branch that is always taken replaces.

    A join among what a product's operand is made of has Triton 3.6 read the operand in an order for which there is no
    matrix load, a fifth more instructions; it does not look into branches, and LLVM takes them away.
    """
    return tl.zeros((KEYS, DIM), tl.float16)


@triton.jit
def _sixteen(x, KEYS: tl.constexpr, DIM: tl.constexpr):
    """[KEYS, DIM]: each element sixteen times in a row, which costs no instruction."""
    two = tl.join(x, x)
    four = tl.join(two, two)
    eight = tl.join(four, four)
    return tl.reshape(tl.join(eight, eight), (KEYS, DIM))


@triton.jit
def _unpacked(
    words, scales, DIM: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """[KEYS, DIM] of words of codes and their scales."""
    if FORMAT == "mxfp4":
        power = tl.where(scales == 0, 1 << 22, scales.to(tl.int32) << 23)  # E8M0 as fp32: 0 is 2**-127, 255 is NaN
        power = tl.where(scales == 255, 0x7FC00000, power)
        step = _sixteen(power.to(tl.float32, bitcast=True), KEYS, DIM)
        tile = _halves(_sixteen(words, KEYS, DIM), DIM).to(tl.float32) * 64.0 * step
    else:
        lifted = (scales.to(tl.float8e4nv, bitcast=True).to(tl.float16) * LIFT).to(tl.float16)
        step = _sixteen(lifted, KEYS, DIM)
        if NATIVE:
            tile = hidden(KEYS, DIM)
            if tl.num_programs(0) > 0:
                tile = tl.inline_asm_elementwise(
                    UNPACK, OPERANDS, [_sixteen(words, KEYS, DIM), step], dtype=tl.float16, is_pure=True, pack=WORD
                )
        else:
            tile = _halves(_sixteen(words, KEYS, DIM), DIM) * step
        if tl.float16 != COMPUTE:
            tile = tile.to(tl.float32)
    return tile.to(COMPUTE)


@triton.jit
def _halves(codes, DIM: tl.constexpr):
    """fp16, 2**-6 of the numbers that E2M1 codes stand for."""
    column = tl.arange(0, DIM)
    nibble = column % 16 // 8 * 8 + column % 4 * 2 + column % 8 // 4
    code = (codes >> (nibble * 4).to(tl.int64)[None, :]).to(tl.int32)
    return (((code & 8) << 4) | ((code & 7) << 2)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


def _instructions() -> str:
    """PTX for a word: the even and the odd codes of each half as E4M3 in four bytes, to fp16 by pairs, times the scale.

    Seven shifts and logical instructions for eight elements, and a conversion and a product for two.
    """
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
            for number, half in ((register, "a"), (register + 1, "b")):
                lines += [
                    f"cvt.rn.f16x2.e4m3x2 ${number}, {half};",
                    f"mul.f16x2 ${number}, ${number}, ${24 + number};",
                ]
    return "{ " + " ".join(lines) + " }"


UNPACK = tl.constexpr(_instructions())
OPERANDS = tl.constexpr(",".join(["=r"] * 8 + ["l"] * 16 + ["r"] * 8))
