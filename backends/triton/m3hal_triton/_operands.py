"""Stored keys and values from memory to the registers that a product takes them from.

A tile that goes through shared memory on its way to the matrix unit costs more of that memory's bandwidth than a
multiprocessor has. So a lane loads the words whose numbers it will hold as operands, and nothing is exchanged. The unit
wants four lanes along the axis that a product sums over and eight along the other; the rest is naming: which key a
column of scores is (:func:`tokens`), which element of a vector a row of keys is (:func:`key_dims`). A product's pairs
lie along the axis it sums over, for values along tokens: bytes of two tokens are interleaved while they are codes,
which costs an instruction for eight of them.

A leading axis of GROUPS says which warp a part of the keys belongs to: products over it are products of one warp each,
and warps meet in nothing but the end. Triton gives lanes and warps to the axes of a load in the order of what it is
told to be contiguous, so that is what the hints say, true or not, of all but the last axis.

Heads of 128 elements, FORMAT fp8_e4m3 or nvfp4, products in fp16; loads are of 16 bytes, or 8 for NVFP4's values. BF16
gains nothing from this: it needs no conversion, and a copy to shared memory takes no registers while it waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: elements of a head
DIM = tl.constexpr(128)


@triton.jit
def factor(global_scale, FORMAT: tl.constexpr):
    """fp32: operands times this are the stored numbers. NVFP4's are 2**-6 of those, which is exact in fp16."""
    value = 64.0 if FORMAT == "nvfp4" else 1.0
    if global_scale is not None:
        value = value * tl.load(global_scale)
    return value


@triton.jit
def tokens(GROUPS: tl.constexpr, KEYS: tl.constexpr):
    """int32 [GROUPS, KEYS]: the key, counted from a step's first, that a row of values and a column of scores is."""
    row = tl.arange(0, KEYS)
    within = row // 8 * 8 + row % 2 * 4 + row // 2 % 4
    return tl.arange(0, GROUPS)[:, None] * KEYS + within[None, :]


@triton.jit
def key_dims(FORMAT: tl.constexpr):
    """int32 [128]: the element that a row of :func:`as_keys` is."""
    row = tl.arange(0, DIM)
    lane, index = row // 2 % 4, row // 8 * 2 + row % 2  # of the four lanes; among a lane's 32 elements
    if FORMAT == "nvfp4":
        dim = lane * 32 + index // 8 * 8 + index % 4 * 2 + index % 8 // 4
    else:
        dim = index // 16 * 64 + lane * 16 + index % 16
    return dim


@triton.jit
def load_keys(
    cache, part, page, head, offset, there,
    TOKEN: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """int32 words of a step's keys.

    part: of :mod:`_pages`; page: int64; offset: int32, of the step's first key in its page; there: 1 if there is such a
    step at all, else 0; TOKEN: part.token, so that a lane's addresses are one and constants.
    """
    CHUNKS: tl.constexpr = 1 if FORMAT == "nvfp4" else 2  # of 64 bytes, of a key
    rep = tl.arange(0, CHUNKS * KEYS // 8)[:, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None]
    lane = tl.arange(0, 8)[None, None, :, None]
    word = tl.arange(0, 16)[None, None, None, :]
    key = group * KEYS + rep // CHUNKS * 8 + lane % 2 * 4 + lane // 2
    base = cache + (page * part.page + head * part.head + part.codes + offset * TOKEN)
    at = base + (key * TOKEN + (rep % CHUNKS * 16 + word) * 4)
    at = tl.multiple_of(tl.max_contiguous(at.to(tl.pointer_type(tl.int32)), [1, 2, 4, 8]), [1, 1, 1, 16])
    return tl.load(at, mask=(key + word) * 0 + there > 0)


@triton.jit
def load_key_scales(
    cache, part, page, head, offset, there, GROUPS: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr
):
    """The two scales of a lane's words of :func:`load_keys`, as int16; 0 in a format without scales."""
    scales = 0
    if FORMAT == "nvfp4":
        rep = tl.arange(0, KEYS // 8)[:, None, None, None]
        group = tl.arange(0, GROUPS)[None, :, None, None]
        lane = tl.arange(0, 8)[None, None, :, None]
        quarter = tl.arange(0, 4)[None, None, None, :]
        key = group * KEYS + rep * 8 + lane % 2 * 4 + lane // 2
        base = cache + (page * part.page + head * part.scale_head + part.scales + offset * 8)
        at = (base + (key * 8 + quarter * 2)).to(tl.pointer_type(tl.int16))
        at = tl.multiple_of(tl.max_contiguous(at, [1, 2, 4, 8]), [1, 1, 1, 2])
        scales = tl.load(at, mask=(key + quarter) * 0 + there > 0)
    return scales


@triton.jit
def key_words(base, there, SKIP: tl.constexpr, TOKEN: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr):
    """:func:`load_keys` of NVFP4. base: where the codes of the step's first key are.

    SKIP: nothing is read unless ``there`` is 1, which costs an instruction a register.
    """
    rep = tl.arange(0, KEYS // 8)[:, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None]
    lane = tl.arange(0, 8)[None, None, :, None]
    word = tl.arange(0, 16)[None, None, None, :]
    # a lane's address first, then what is the same for all lanes: an immediate of the load
    at = base + ((group * KEYS + lane % 2 * 4 + lane // 2) * TOKEN + word * 4)
    at = at + (rep * (8 * TOKEN)).to(tl.int64)
    at = tl.multiple_of(tl.max_contiguous(at.to(tl.pointer_type(tl.int32)), [1, 2, 4, 8]), [1, 1, 1, 16])
    if SKIP:  # noqa: SIM108 (a load of Triton's is no expression of Python's)
        words = tl.load(at, mask=(rep + group + lane + word) * 0 + there > 0)
    else:
        words = tl.load(at)
    return words


@triton.jit
def key_scales(base, there, SKIP: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr):
    """The two scales of a lane's words of :func:`key_words`, as int16. base: where those of the first key are."""
    rep = tl.arange(0, KEYS // 8)[:, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None]
    lane = tl.arange(0, 8)[None, None, :, None]
    quarter = tl.arange(0, 4)[None, None, None, :]
    at = base + ((group * KEYS + lane % 2 * 4 + lane // 2) * 8 + quarter * 2)
    at = (at + (rep * 64).to(tl.int64)).to(tl.pointer_type(tl.int16))
    at = tl.multiple_of(tl.max_contiguous(at, [1, 2, 4, 8]), [1, 1, 1, 2])
    if SKIP:  # noqa: SIM108 (a load of Triton's is no expression of Python's)
        scales = tl.load(at, mask=(rep + group + lane + quarter) * 0 + there > 0)
    else:
        scales = tl.load(at)
    return scales


@triton.jit
def as_keys(words, scales, GROUPS: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """fp16 [GROUPS, 128, KEYS] of what :func:`load_keys` and :func:`load_key_scales` returned."""
    REPS: tl.constexpr = KEYS // 8
    if FORMAT == "nvfp4":
        # a lane's four words are two of sixteen codes, each with its scale
        pair = _pair(scales.to(tl.int32) & 0xFFFF, NATIVE)
        low, high = _both(pair, 0, NATIVE), _both(pair, 1, NATIVE)
        step = tl.permute(tl.join(tl.join(low, low), tl.join(high, high)), (0, 1, 2, 3, 5, 4))
        step = tl.reshape(step, (REPS, GROUPS, 8, 16))
        tile = _codes_of_keys(words, step, REPS, GROUPS, NATIVE)  # [REPS, GROUPS, 8, 16, 8]
        tile = tl.reshape(tile, (1, REPS, GROUPS, 8, 4, 16, 2))
        tile = tl.permute(tile, (2, 0, 5, 4, 6, 1, 3))
    else:
        tile = _bytes_of_keys(words, 2 * REPS, GROUPS, NATIVE)  # [2 * REPS, GROUPS, 8, 16, 4]
        tile = tl.reshape(tile, (REPS, 2, GROUPS, 8, 4, 8, 2))
        tile = tl.permute(tile, (2, 1, 5, 4, 6, 0, 3))
    return tl.reshape(tile, (GROUPS, DIM, KEYS))


@triton.jit
def load_values(
    cache, part, page, head, offset, until, second: tl.constexpr,
    TOKEN: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """FP8: int32 words of the first, or the second, token of each pair; zeros for tokens from ``until`` on."""
    WORDS: tl.constexpr = 4  # of a lane, for a token
    rep = tl.arange(0, KEYS // 8)[:, None, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None, None]
    block = tl.arange(0, 8)[None, None, :, None, None]
    lane = tl.arange(0, 4)[None, None, None, :, None]
    word = tl.arange(0, WORDS)[None, None, None, None, :]
    key = group * KEYS + rep * 8 + second * 4 + lane
    base = cache + (page * part.page + head * part.head + part.codes + offset * TOKEN)
    at = base + (key * TOKEN + (block * WORDS + word) * 4)
    at = tl.max_contiguous(at.to(tl.pointer_type(tl.int32)), [1, 2, 4, 8, 16])
    at = tl.multiple_of(at, [1, 1, 1, 1, 4 * WORDS])
    return tl.load(at, mask=key + block * 0 + word * 0 < until, other=0)


@triton.jit
def value_words(
    base, there, second: tl.constexpr, SKIP: tl.constexpr, TOKEN: tl.constexpr, GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """NVFP4: int32 words of the first, or the second, token of each pair. Codes have no NaN, so none is masked."""
    rep = tl.arange(0, KEYS // 8)[:, None, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None, None]
    block = tl.arange(0, 8)[None, None, :, None, None]
    lane = tl.arange(0, 4)[None, None, None, :, None]
    word = tl.arange(0, 2)[None, None, None, None, :]
    at = base + ((group * KEYS + lane) * TOKEN + (block * 2 + word) * 4)
    at = at + ((rep * 8 + second * 4) * TOKEN).to(tl.int64)
    at = tl.max_contiguous(at.to(tl.pointer_type(tl.int32)), [1, 2, 4, 8, 16])
    at = tl.multiple_of(at, [1, 1, 1, 1, 8])
    if SKIP:  # noqa: SIM108 (a load of Triton's is no expression of Python's)
        words = tl.load(at, mask=(rep + group + block + lane + word) * 0 + there > 0)
    else:
        words = tl.load(at)
    return words


@triton.jit
def value_scales(
    base, until, second: tl.constexpr, MASKED: tl.constexpr, SKIP: tl.constexpr, GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """uint8, the scale of a lane's words of :func:`value_words`; MASKED: zeros for tokens from ``until`` on.

    Otherwise until is only asked whether there are any, if SKIP.
    """
    rep = tl.arange(0, KEYS // 8)[:, None, None, None]
    group = tl.arange(0, GROUPS)[None, :, None, None]
    block = tl.arange(0, 8)[None, None, :, None]
    lane = tl.arange(0, 4)[None, None, None, :]
    key = group * KEYS + rep * 8 + second * 4 + lane + block * 0
    at = base + (group * (KEYS * 8) + block * 4 + lane)
    at = tl.max_contiguous(at + (rep * 64 + second * 32).to(tl.int64), [1, 2, 4, 8])
    at = tl.multiple_of(at, [1, 1, 1, 1])
    if MASKED:
        scales = tl.load(at, mask=key < until, other=0)
    elif SKIP:
        scales = tl.load(at, mask=key * 0 + until > 0)
    else:
        scales = tl.load(at)
    return scales


@triton.jit
def as_values(
    first, second, first_scales, second_scales,
    GROUPS: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """[GROUPS, KEYS, 128] of the two halves of the pairs, with columns for :func:`over_groups`."""
    REPS: tl.constexpr = KEYS // 8
    if FORMAT == "nvfp4":
        both = first_scales.to(tl.int32) | (second_scales.to(tl.int32) << 8)
        step = tl.expand_dims(_pair(both, NATIVE), 4)
        tile = _codes_of_values(first, second, tl.broadcast_to(step, first.shape), REPS, GROUPS, NATIVE)
    else:
        tile = _bytes_of_values(first, second, REPS, GROUPS, NATIVE)
    # [REPS, GROUPS, 8 blocks, 4 lanes, 16 elements, 2 tokens]
    tile = tl.reshape(tile, (REPS, GROUPS, 8, 4, 16, 2))
    return tl.reshape(tl.permute(tile, (1, 0, 3, 5, 4, 2)), (GROUPS, KEYS, DIM))


@triton.jit
def over_groups(tile, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """The sum [ROWS, 128] over groups, with columns as of :func:`as_values` in the order of the elements.

    By splits, which spread a sum over all threads, where a reduction would leave it to every warp as a whole.
    """
    tile = tl.permute(tl.reshape(tile, (GROUPS, ROWS, 16, 8)), (1, 3, 2, 0))
    tile = tl.reshape(tile, (ROWS, DIM, GROUPS))
    if GROUPS >= 8:
        tile = _halved(tile, ROWS, GROUPS // 4 * 2)
    if GROUPS >= 4:
        tile = _halved(tile, ROWS, 4)
    if GROUPS >= 2:
        tile = _halved(tile, ROWS, 2)
    return tl.reshape(tile, (ROWS, DIM))


@triton.jit
def _halved(tile, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """[ROWS, 128, GROUPS / 2] sums of [ROWS, 128, GROUPS]."""
    even, odd = tl.split(tl.reshape(tile, (ROWS, DIM, GROUPS // 2, 2)))
    return even + odd


@triton.jit
def _times(x, COUNT: tl.constexpr):
    """Each element COUNT times in a row, along a new last axis: 4, 8 or 16; costs no instruction."""
    two = tl.join(x, x)
    tile = tl.join(two, two)
    if COUNT >= 8:
        tile = tl.join(tile, tile)
    if COUNT >= 16:
        tile = tl.join(tile, tile)
    return tl.reshape(tile, x.shape + [COUNT])  # noqa: RUF005 (Triton has no starred expressions)


@triton.jit
def _both(pair, HALF: tl.constexpr, NATIVE: tl.constexpr):
    """int32, one of two fp16 numbers twice."""
    if NATIVE:
        SELECTOR: tl.constexpr = "prmt.b32 $0, $1, $1, 0x3232;" if HALF else "prmt.b32 $0, $1, $1, 0x1010;"
        both = tl.inline_asm_elementwise(SELECTOR, "=r,r", [pair], dtype=tl.int32, is_pure=True, pack=1)
    else:
        one = (pair >> (16 * HALF)) & 0xFFFF
        both = one | (one << 16)
    return both


@triton.jit
def _pair(both, NATIVE: tl.constexpr):
    """int32, the fp16 numbers of two E4M3 scales in 16 bits."""
    if NATIVE:
        pair = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, a; }",
            "=r,r", [both], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        pair = _scale_bits(both & 255) | (_scale_bits(both >> 8) << 16)
    return pair


@triton.jit
def _scale_bits(code):
    scale = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _half(bits):
    """fp16 of its bits, in the low half of an int32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _e2m1(code):
    """fp16, 2**-6 of the number that a code stands for."""
    return (((code & 8) << 4) | ((code & 7) << 2)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _codes_of_keys(words, step, REPS: tl.constexpr, GROUPS: tl.constexpr, NATIVE: tl.constexpr):
    """fp16 [REPS, GROUPS, 8, 16, 8]: the eight codes of a word, times the pair ``step`` of its scale."""
    codes, scales = _times(words, 8), _times(step, 8)
    if NATIVE:
        tile = tl.inline_asm_elementwise(
            KEY_CODES, KEY_CODES_OPERANDS, [codes, scales], dtype=tl.float16, is_pure=True, pack=8
        )
    else:
        place = tl.arange(0, 8)
        shift = ((place % 4 * 2 + place // 4) * 4)[None, None, None, None, :]
        tile = _e2m1((codes >> shift) & 15) * _half(scales)
    return tile


@triton.jit
def _bytes_of_keys(words, REPS: tl.constexpr, GROUPS: tl.constexpr, NATIVE: tl.constexpr):
    """fp16 [REPS, GROUPS, 8, 16, 4]: the four codes of a word."""
    codes = _times(words, 4)
    if NATIVE:
        tile = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r,r,r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        code = (codes >> (tl.arange(0, 4) * 8)[None, None, None, None, :]) & 255
        tile = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tile


@triton.jit
def _codes_of_values(first, second, step, REPS: tl.constexpr, GROUPS: tl.constexpr, NATIVE: tl.constexpr):
    """fp16 [REPS, GROUPS, 8, 4, 2, 16]: the eight codes of a word, each of the first token, then of the second."""
    a, b, scales = _times(first, 16), _times(second, 16), _times(step, 16)
    if NATIVE:
        tile = tl.inline_asm_elementwise(
            VALUE_CODES, VALUE_CODES_OPERANDS, [a, b, scales], dtype=tl.float16, is_pure=True, pack=16
        )
    else:
        column = tl.arange(0, 16)[None, None, None, None, None, :]
        code = (tl.where(column % 2 == 0, a, b) >> (column // 2 * 4)) & 15
        tile = _e2m1(code) * _half(scales >> (column % 2 * 16))
    return tile


@triton.jit
def _bytes_of_values(first, second, REPS: tl.constexpr, GROUPS: tl.constexpr, NATIVE: tl.constexpr):
    """fp16 [REPS, GROUPS, 8, 4, 4, 8]: the four codes of a word, each of the first token, then of the second."""
    a, b = _times(first, 8), _times(second, 8)
    if NATIVE:
        tile = tl.inline_asm_elementwise(
            VALUE_BYTES, VALUE_BYTES_OPERANDS, [a, b], dtype=tl.float16, is_pure=True, pack=8
        )
    else:
        column = tl.arange(0, 8)[None, None, None, None, None, :]
        code = (tl.where(column % 2 == 0, a, b) >> (column // 2 * 8)) & 255
        tile = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tile


def _halves(source: str, order: str, first: int, scale: str) -> list[str]:
    """PTX for eight codes in a register: the even and the odd ones as E4M3 in four bytes, to fp16 by pairs, scaled.

    order: which pair of bytes each output from ``first`` on is: a and b of the even ones, c and d of the odd ones.
    """
    lines = [
        f"shl.b32 even, {source}, 2;",
        f"shl.b32 sign, {source}, 4;",
        "and.b32 even, even, 0x1C1C1C1C;",
        "lop3.b32 even, sign, 0x80808080, even, 0xEA;",  # (sign & mask) | even
        f"shr.u32 odd, {source}, 2;",
        "and.b32 odd, odd, 0x1C1C1C1C;",
        f"lop3.b32 odd, {source}, 0x80808080, odd, 0xEA;",
        "mov.b32 {a, b}, even;",
        "mov.b32 {c, d}, odd;",
    ]
    for output, half in enumerate(order, first):
        lines += [f"cvt.rn.f16x2.e4m3x2 ${output}, {half};", f"mul.f16x2 ${output}, ${output}, {scale};"]
    return lines


def _ptx(*lines: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 even, odd, sign, x; .reg .b16 a, b, c, d; " + " ".join(lines) + " }")


def _operands(outputs: int, inputs: int) -> tl.constexpr:
    return tl.constexpr(",".join(["=r"] * outputs + ["r"] * inputs))


KEY_CODES, KEY_CODES_OPERANDS = _ptx(*_halves("$4", "abcd", 0, "$12")), _operands(4, 16)
VALUE_CODES = _ptx(
    "prmt.b32 x, $8, $24, 0x5140;",  # bytes 0 and 1 of both tokens, in turn
    *_halves("x", "acbd", 0, "$40"),
    "prmt.b32 x, $8, $24, 0x7362;",
    *_halves("x", "acbd", 4, "$40"),
)
VALUE_CODES_OPERANDS = _operands(8, 48)
VALUE_BYTES = _ptx(
    "prmt.b32 x, $4, $12, 0x5140; mov.b32 {a, b}, x;",
    "prmt.b32 x, $4, $12, 0x7362; mov.b32 {c, d}, x;",
    *(f"cvt.rn.f16x2.e4m3x2 ${output}, {half};" for output, half in enumerate("abcd")),
)
VALUE_BYTES_OPERANDS = _operands(4, 16)
