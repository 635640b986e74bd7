"""``kv_read``: tokens back out of a paged cache, as the definition reads them, NaN and subnormal scales included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3hal.layouts import PagedCache, paged
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton import _pages
from m3hal_triton._rows import items

#: vectors of one program
ROWS = 16
QUAD = tl.constexpr(paged.QUAD)


def kv_read(site: Site) -> object:
    """The callable, the same for every site."""
    return _read


def _read(
    cache: PagedCache, slots: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor | None] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    result = load("kv_read").fake(cache, slots) if out is None else out
    if not slots.shape[0]:
        return result
    layout, (k, v) = cache.layout, result
    for to, part, scale in ((k, _pages.keys(cache), cache.k_scale), (v, _pages.values(cache), cache.v_scale)):
        if to is not None:
            _vectors[(triton.cdiv(slots.shape[0] * layout.heads, ROWS),)](
                _pages.memory(cache), part, scale, slots, slots.stride(0), to, to.stride(), slots.shape[0],
                HEADS=layout.heads,
                ROWS=ROWS,
                DIM=layout.dim,
                PADDED=triton.next_power_of_2(layout.dim),
                PAGE=layout.page_size,
                FORMAT=layout.format,
                VALUES=to is v,
            )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["tokens"])
def _vectors(
    cache, part, multiplier, slots, slot_stride, out, out_strides, tokens,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, FORMAT: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    item, head, real = items(tl.program_id(0), 0, tokens, HEADS, ROWS)
    slot = tl.load(slots + item * slot_stride, mask=real, other=-1).to(tl.int64)
    page, token = slot // PAGE * part.page, slot % PAGE
    at = cache + (part.codes + page + head * part.head + token * part.token)
    dim = tl.arange(0, PADDED)[None, :]
    there = (slot >= 0) & (dim < DIM)
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        ALL: tl.constexpr = DIM // GROUP
        code = tl.load(at + dim // 2, mask=there, other=0).to(tl.int32) >> (dim % 2 * 4) & 15
        first = part.scales + page + head * part.scale_head + token // QUAD * (QUAD * ALL)
        group = dim // GROUP
        within = group * QUAD + token % QUAD if VALUES else token % QUAD * ALL + group
        scale = tl.load(cache + (first + within), mask=there, other=0).to(tl.int32)
        number = _e2m1(code) * (_e4m3(scale) if FORMAT == "nvfp4" else _e8m0(scale))
    elif FORMAT == "fp8_e4m3":
        number = _e4m3(tl.load(at + dim * part.column, mask=there, other=0).to(tl.int32))
    else:
        number = tl.load(at + dim * part.column, mask=there, other=0.0).to(tl.float32)
    if multiplier is not None:
        number = number * tl.load(multiplier).to(tl.float32)
    number = tl.where(there, number, 0.0)
    tl.store(
        out + item * out_strides[0] + head * out_strides[1] + dim * out_strides[2], number, mask=real & (dim < DIM)
    )


@triton.jit
def _signed(magnitude, sign):
    """fp32 of bits without a sign and a sign of 0 or 1; Triton's own minus would make 0 of -0."""
    return (magnitude | sign << 31).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(code):
    """fp32 of codes 0 to 15."""
    exponent, mantissa = code >> 1 & 3, code & 1
    half = tl.where(mantissa == 0, 0, 126 << 23)
    return _signed(tl.where(exponent == 0, half, 126 + exponent << 23 | mantissa << 22), code >> 3)


@triton.jit
def _e4m3(code):
    """fp32 of codes 0 to 255, NaN for 0x7F and 0xFF."""
    magnitude = code & 0x7F
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < 8, subnormal, (magnitude + (120 << 3)) << 20)
    return _signed(tl.where(magnitude == 0x7F, 0x7FC00000, bits), code >> 7)


@triton.jit
def _e8m0(code):
    """fp32 of codes 0 to 255: 2**-127 is subnormal, 255 is NaN."""
    bits = tl.where(code == 0, 0x400000, code << 23)
    return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))
