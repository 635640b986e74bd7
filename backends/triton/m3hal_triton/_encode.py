"""Rounds to a cache's format and stores: the one place where kernels write bytes of a cache.

The bytes are those of :mod:`m3hal.formats` on every target, and in the interpreter: integer and fp32 arithmetic, and
where it is known to round the same, the conversion instruction to E4M3. FORMAT is a cache format by its name.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal.layouts import paged

#: tokens whose value scales lie interleaved
QUAD = tl.constexpr(paged.QUAD)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def e4m3(x, NATIVE: tl.constexpr):
    """int32 codes of fp32 numbers: to nearest, ties to even, saturating at 448; NaN becomes 0x7F.

    NATIVE: by the target's conversion, for codes that are only stored.
    """
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # beyond 448 everything is 448; NaN too, until the end
    size = tl.minimum(magnitude, 0x43E00000)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # 2**14 is spaced by 2**-9, as the subnormal codes are
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > _INFINITY, 0x7F, code)


@triton.jit
def e4m3_number(code):
    """fp32 of int32 codes 0x00 to 0x7E."""
    normal = ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def e2m1(magnitude, unit):
    """int32 codes, without a sign, of ``magnitude / unit``: to nearest, ties to even, saturating.

    magnitude: the bits of fp32 numbers that are not negative, which compare as they do; NaN as above all. unit: at most
    four significant bits, so its products with midpoints are exact, and comparing with them is what comparing the
    correctly rounded quotient with the midpoints would be. A midpoint belongs to the even code: the lower one's bound
    is the next number.
    """
    half = magnitude >= _bits(1.75 * unit)
    quarter = magnitude >= tl.where(half, _bits(3.5 * unit), _bits(0.75 * unit))
    upper = tl.where(quarter, _bits(5.0 * unit), _bits(2.5 * unit))
    lower = tl.where(quarter, _bits(1.25 * unit), _bits(0.25 * unit))
    odd = magnitude > tl.where(half, upper, lower)
    return tl.where(half, 4, 0) + tl.where(quarter, 2, 0) + tl.where(odd, 1, 0)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def block_scale(amax):
    """Scale bytes, int32, and their numbers, fp32, for a block's largest magnitude, int32 bits below NaN's: amax / 6.

    In E4M3 from 2**-9 on, to nearest, ties to even, saturating at 448. The quotient is corrected by its remainder, of
    which every step is exact, multiplied and added apart or at once, so it is the correctly rounded one.
    """
    # not by the instruction: with its result taken apart again, ptxas 12.8 made other scales of the same PTX (H200)
    amax = tl.minimum(amax, 0x45800000).to(tl.float32, bitcast=True)  # 4096 saturates, and has a remainder
    first = amax * 0.16666667163372039794921875
    scale = first + (amax - 4.0 * first - 2.0 * first) * 0.16666667163372039794921875
    scale = tl.minimum(tl.maximum(scale, 0.001953125), 448.0)
    bits = _bits(scale)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0x7FF00000
    subnormal = scale + 16384.0  # which is spaced by 2**-9, as the subnormal codes are
    small = scale < 0.015625
    code = tl.where(small, _bits(subnormal) - 0x46800000, (normal >> 20) - (120 << 3))
    return code, tl.where(small, subnormal - 16384.0, normal.to(tl.float32, bitcast=True))


@triton.jit
def nvfp4(groups):
    """Codes [R, G, 16] and scale bytes [R, G], int32, of fp32 [R, G, 16] divided by the global scale."""
    scale, unit = nvfp4_scale(groups)
    return nvfp4_codes(groups, unit), scale


@triton.jit
def nvfp4_scale(groups):
    """The scales' bytes, int32 [R, G], and their numbers, fp32."""
    magnitude = _bits(groups) & 0x7FFFFFFF
    return block_scale(tl.max(tl.where(magnitude > _INFINITY, 0, magnitude), 2))


@triton.jit
def nvfp4_codes(groups, unit):
    bits = _bits(groups)
    code = e2m1(bits & 0x7FFFFFFF, unit[:, :, None])
    # zero is always +0, and NaN +6: the bits of negative numbers are integers up to those of -infinity
    return tl.where((bits <= -0x800000) & (code != 0), code + 8, code)


@triton.jit
def mxfp4(groups):
    """Codes [R, G, 32] and scale bytes [R, G], int32, of fp32 [R, G, 32]."""
    scale, inverse = mxfp4_scale(groups)
    return mxfp4_codes(groups, inverse), scale


@triton.jit
def mxfp4_scale(groups):
    """The scales' bytes, int32 [R, G], and the reciprocals of their numbers, fp32; NaN for a block with NaN."""
    amax = tl.max(_bits(groups) & 0x7FFFFFFF, 2)  # as integers, NaN exceeds all numbers
    # from 1.75 * 2**k up, amax counts as 2**(k + 1); 6 reaches to the second binade above 1
    scale = tl.maximum(((amax + 0x200000) >> 23) - 2, 0)
    scale = tl.where(amax == _INFINITY, 254, tl.where(amax > _INFINITY, 255, scale))
    # 2**(127 - scale), which is subnormal for 254
    inverse = tl.where(scale == 254, 0x400000, (254 - scale) << 23)
    return scale, tl.where(scale == 255, 0x7FC00000, inverse).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_codes(groups, inverse):
    bits = _bits(groups)
    magnitude = _bits(tl.abs(groups) * inverse[:, :, None])
    code = e2m1(magnitude, tl.full((1, 1, 1), 1.0, tl.float32)) | ((bits >> 28) & 8)
    return tl.where(inverse[:, :, None] != inverse[:, :, None], 7, code)


@triton.jit
def loaded(multiplier):
    """The global scale behind a pointer, in a tuple; an empty one for None."""
    scale = ()
    if multiplier is not None:
        scale = (tl.load(multiplier).to(tl.float32),)
    return scale


@triton.jit
def divisor(scale, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """What :func:`put` needs of what :func:`loaded` returned. It branches: other loads had better come before."""
    by = scale
    if len(scale) > 0:
        if FORMAT == "nvfp4":  # which multiplies by the reciprocal
            by = (tl.div_rn(1.0, scale[0]),)
        elif NATIVE:
            # so that neither the reciprocal nor a remainder leaves fp32's range
            size = tl.abs(scale[0])
            power = tl.where(size < 2.0**-60, 2.0**100, tl.where(size > 2.0**60, 2.0**-100, 1.0))
            by = (power, scale[0] * power, tl.div_rn(1.0, scale[0] * power))
    return by


@triton.jit
def _quotient(x, by):
    """x / scale in fp32 as far as its E4M3 code goes: correctly rounded from its least to its largest number.

    Two steps by the exact remainder make the last one's quotient the correctly rounded one, as the reciprocal is.
    Division by instructions has a branch for each element, so that none is under way beside another.
    """
    power, scale, reciprocal = by
    x = x * power
    first = x * reciprocal
    second = tl.fma(tl.fma(-scale, first, x), reciprocal, first)
    third = tl.fma(tl.fma(-scale, second, x), reciprocal, second)
    # infinities have no remainder, and zeros would lose their sign
    return tl.where((tl.abs(first) < 4096.0) & (first != 0.0), third, first)


@triton.jit
def put(
    parts,
    start,
    real,
    memory,
    part,
    slot,
    head,
    by,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    VALUES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Stores vectors of length DIM. All is rounded before anything is stored, so that no part waits for another.

    parts: a tuple of [R, N], any float, the vectors' columns in order from ``start * N`` on; what lies beyond DIM is
    not stored. real: [R, 1], rows that are. memory: pointer to the cache. part: a :class:`~m3hal_triton._pages.Part`,
    of values if VALUES. slot: int64 [R, 1]. head: [R, 1]. by: what :func:`divisor` returned. NATIVE: see
    :func:`~m3hal_triton._launch.converts`.
    """
    WIDTH: tl.constexpr = parts[0].shape[1]
    page, token = slot // PAGE * part.page, slot % PAGE
    at = memory + (part.codes + page + head * part.head + token * part.token)
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        ALL: tl.constexpr = DIM // GROUP
        # step by step for all parts, whose chains then run side by side
        groups = (_grouped(parts[0], by, GROUP),)
        for i in tl.static_range(1, len(parts)):
            groups = groups + (_grouped(parts[i], by, GROUP),)  # noqa: RUF005
        scales = (_block_scales(groups[0], FORMAT),)
        for i in tl.static_range(1, len(parts)):
            scales = scales + (_block_scales(groups[i], FORMAT),)  # noqa: RUF005
        codes = (_pairs(groups[0], scales[0][1], FORMAT),)
        for i in tl.static_range(1, len(parts)):
            codes = codes + (_pairs(groups[i], scales[i][1], FORMAT),)  # noqa: RUF005
        byte, group = tl.arange(0, WIDTH // 2)[None, :], tl.arange(0, WIDTH // GROUP)[None, :]
        for i in tl.static_range(len(parts)):
            of = (start + i) * (WIDTH // 2) + byte
            tl.store(at + of, codes[i], mask=real & (of < DIM // 2))
        first = part.scales + page + head * part.scale_head + token // QUAD * (QUAD * ALL)
        for i in tl.static_range(len(parts)):
            of = (start + i) * (WIDTH // GROUP) + group
            within = of * QUAD + token % QUAD if VALUES else token % QUAD * ALL + of
            tl.store(memory + (first + within), scales[i][0].to(tl.uint8), mask=real & (of < ALL))
    else:
        stored = (_number(parts[0], by, memory, FORMAT, NATIVE),)
        for i in tl.static_range(1, len(parts)):
            stored = stored + (_number(parts[i], by, memory, FORMAT, NATIVE),)  # noqa: RUF005
        for i in tl.static_range(len(parts)):
            column = (start + i) * WIDTH + tl.arange(0, WIDTH)[None, :]
            tl.store(at + column * part.column, stored[i], mask=real & (column < DIM))


@triton.jit
def _grouped(x, by, GROUP: tl.constexpr):
    """x [R, N] in fp32, divided by the global scale, [R, N / GROUP, GROUP]."""
    number = x.to(tl.float32)
    if len(by) > 0:
        number = number * by[0]
    return tl.reshape(number, (x.shape[0], x.shape[1] // GROUP, GROUP))


@triton.jit
def _block_scales(groups, FORMAT: tl.constexpr):
    return nvfp4_scale(groups) if FORMAT == "nvfp4" else mxfp4_scale(groups)


@triton.jit
def _pairs(groups, unit, FORMAT: tl.constexpr):
    """Bytes of two codes, [R, N / 2]."""
    codes = nvfp4_codes(groups, unit) if FORMAT == "nvfp4" else mxfp4_codes(groups, unit)
    even, odd = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] * codes.shape[2] // 2, 2)))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def _number(x, by, memory, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """x as a format without blocks stores it."""
    if FORMAT == "fp8_e4m3":
        number = x.to(tl.float32)
        if len(by) > 0:
            number = _quotient(number, by) if NATIVE else tl.div_rn(number, by[0])
        return e4m3(number, NATIVE).to(tl.uint8)
    return x.to(memory.dtype.element_ty)


@triton.jit
def _scaled(x, multiplier):
    """x in fp32, divided by the global scale as NVFP4 does it: by its reciprocal."""
    x = x.to(tl.float32)
    if multiplier is not None:
        x = x * tl.div_rn(1.0, tl.load(multiplier).to(tl.float32))
    return x
