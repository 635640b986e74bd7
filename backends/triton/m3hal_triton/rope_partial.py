"""``rope_partial``: the rotated part in fp32 and rounded once, the rest as it is."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._rows import items

#: heads of one program
ROWS = 16


def rope_partial(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_rotate, site)


def _rotate(
    site: Site, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = load("rope_partial").fake(x, positions, cos_sin) if out is None else out
    if not x.numel():
        return out
    tokens, heads, dim = x.shape
    rest = dim - site.rotary_dim
    _rows[(triton.cdiv(tokens * heads, ROWS),)](
        x, positions, cos_sin, out, x.stride(), positions.stride(0), cos_sin.stride(), out.stride(), tokens,
        HEADS=heads,
        ROWS=ROWS,
        HALF=site.rotary_dim // 2,
        PADDED_HALF=triton.next_power_of_2(site.rotary_dim // 2),
        REST=rest,
        PADDED_REST=triton.next_power_of_2(rest),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def _rows(
    x, positions, cos_sin, out, x_strides, position_stride, table, out_strides, tokens,
    HEADS: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, REST: tl.constexpr, PADDED_REST: tl.constexpr,
):  # fmt: skip
    token, head, real = items(tl.program_id(0), 0, tokens, HEADS, ROWS)
    at = x + token * x_strides[0] + head * x_strides[1]
    to = out + token * out_strides[0] + head * out_strides[1]
    half = tl.arange(0, PADDED_HALF)[None, :]
    there = real & (half < HALF)
    first = tl.load(at + half * x_strides[2], mask=there, other=0.0).to(tl.float32)
    second = tl.load(at + (HALF + half) * x_strides[2], mask=there, other=0.0).to(tl.float32)
    angles = cos_sin + tl.load(positions + token * position_stride, mask=real, other=0).to(tl.int64) * table[0]
    cos = tl.load(angles + half * table[1], mask=there, other=0.0).to(tl.float32)
    sin = tl.load(angles + (HALF + half) * table[1], mask=there, other=0.0).to(tl.float32)
    element = out.dtype.element_ty
    tl.store(to + half * out_strides[2], (first * cos - second * sin).to(element), mask=there)
    tl.store(to + (HALF + half) * out_strides[2], (second * cos + first * sin).to(element), mask=there)
    if REST > 0:
        other = 2 * HALF + tl.arange(0, PADDED_REST)[None, :]
        there = real & (other < 2 * HALF + REST)
        tl.store(to + other * out_strides[2], tl.load(at + other * x_strides[2], mask=there), mask=there)
