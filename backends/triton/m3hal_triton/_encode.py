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
def nvfp4(groups):
    """Codes [R, G, 16] and scale bytes [R, G], int32, of fp32 [R, G, 16] divided by the global scale."""
    bits = groups.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    nan = magnitude > _INFINITY
    amax = tl.max(tl.where(nan, 0, magnitude), 2).to(tl.float32, bitcast=True)
    # not by the instruction: with its result taken apart again, ptxas 12.8 made other scales of the same PTX (H200)
    scale = e4m3(tl.maximum(tl.div_rn(amax, 6.0), 0.001953125), False)
    code = e2m1(magnitude, e4m3_number(scale)[:, :, None])
    code = tl.where(code == 0, 0, code | ((bits >> 28) & 8))  # zero is always +0
    return tl.where(nan, 7, code), scale


@triton.jit
def mxfp4(groups):
    """Codes [R, G, 32] and scale bytes [R, G], int32, of fp32 [R, G, 32]."""
    bits = groups.to(tl.int32, bitcast=True)
    amax = tl.max(bits & 0x7FFFFFFF, 2)  # as integers, NaN exceeds all numbers
    # from 1.75 * 2**k up, amax counts as 2**(k + 1); 6 reaches to the second binade above 1
    scale = tl.maximum(((amax + 0x200000) >> 23) - 2, 0)
    scale = tl.where(amax == _INFINITY, 254, tl.where(amax > _INFINITY, 255, scale))
    # 2**(127 - scale), which is subnormal for 254
    inverse = tl.where(scale == 254, 0x400000, (254 - scale) << 23).to(tl.float32, bitcast=True)
    code = e2m1(_bits(tl.abs(groups) * inverse[:, :, None]), tl.full((1, 1, 1), 1.0, tl.float32)) | ((bits >> 28) & 8)
    return tl.where((scale == 255)[:, :, None], 7, code), scale


@triton.jit
def put(
    x,
    real,
    memory,
    part,
    slot,
    head,
    multiplier,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    VALUES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Stores columns FIRST, FIRST + 1, ... of vectors of length DIM.

    x: [R, N], any float; what lies beyond DIM is not stored. real: [R, 1], rows that are. memory: pointer to the
    cache. part: a :class:`~m3hal_triton._pages.Part`, of values if VALUES. slot: int64 [R, 1]. head: [R, 1].
    multiplier: pointer to the fp32 global scale, or None. NATIVE: see :func:`~m3hal_triton._launch.converts`.
    """
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    page, token = slot // PAGE * part.page, slot % PAGE
    at = memory + (part.codes + page + head * part.head + token * part.token)
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        GROUPS: tl.constexpr = WIDTH // GROUP
        ALL: tl.constexpr = DIM // GROUP
        grouped = tl.reshape(_scaled(x, multiplier), (ROWS, GROUPS, GROUP))
        code, scale = nvfp4(grouped) if FORMAT == "nvfp4" else mxfp4(grouped)
        even, odd = tl.split(tl.reshape(code, (ROWS, WIDTH // 2, 2)))
        byte, group = FIRST // 2 + tl.arange(0, WIDTH // 2)[None, :], FIRST // GROUP + tl.arange(0, GROUPS)[None, :]
        tl.store(at + byte, (even | (odd << 4)).to(tl.uint8), mask=real & (byte < DIM // 2))
        first = part.scales + page + head * part.scale_head + token // QUAD * (QUAD * ALL)
        within = group * QUAD + token % QUAD if VALUES else token % QUAD * ALL + group
        tl.store(memory + (first + within), scale.to(tl.uint8), mask=real & (group < ALL))
    else:
        column = FIRST + tl.arange(0, WIDTH)[None, :]
        if FORMAT == "fp8_e4m3":
            number = x.to(tl.float32)
            if multiplier is not None:
                number = tl.div_rn(number, tl.load(multiplier).to(tl.float32))
            stored = e4m3(number, NATIVE).to(tl.uint8)
        else:
            stored = x.to(memory.dtype.element_ty)
        tl.store(at + column * part.column, stored, mask=real & (column < DIM))


@triton.jit
def _scaled(x, multiplier):
    """x in fp32, divided by the global scale as NVFP4 does it: by its reciprocal."""
    x = x.to(tl.float32)
    if multiplier is not None:
        x = x * tl.div_rn(1.0, tl.load(multiplier).to(tl.float32))
    return x
