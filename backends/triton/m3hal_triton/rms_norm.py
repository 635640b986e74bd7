"""``rms_norm`` and ``add_rms_norm``: one row a program, read once."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._launch import power_of_two_above

#: of a program, which is a row
MOST_WARPS = 8
#: looked up here: torch.compile looks into the callables, and can't follow a lookup
_FAKE, _ADD_FAKE = load("rms_norm").fake, load("add_rms_norm").fake


def rms_norm(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_norm, site)


def add_rms_norm(site: Site) -> partial[tuple[torch.Tensor, torch.Tensor]]:
    """The callable for a site."""
    return partial(_add_norm, site)


def _norm(site: Site, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    out = _FAKE(x, weight) if out is None else out
    _launch(site, x, x, weight, out, out, False)
    return out


def _add_norm(
    site: Site,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor]
    result = _ADD_FAKE(x, residual, weight) if out is None else out
    _launch(site, x, residual, weight, *result, True)
    return result


def _launch(
    site: Site,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    add: bool,
) -> None:
    width = x.shape[-1]
    if not x.numel():
        return
    rows = [t.view(-1, width) if t.is_contiguous() else t.flatten(0, -2) for t in (x, residual, out, residual_out)]
    padded = power_of_two_above(width)
    _rows[(rows[0].shape[0],)](
        *rows,
        weight,
        *(t.stride(0) for t in rows),
        *(t.stride(1) for t in rows),
        weight.stride(0),
        site.eps,
        site.weight_offset,
        width,
        PADDED=padded,
        ADD=add,
        num_warps=max(1, min(MOST_WARPS, padded // 512)),
    )


@triton.jit
def _rows(
    x,
    residual,
    out,
    residual_out,
    weight,
    x_row,
    residual_row,
    out_row,
    residual_out_row,
    x_column,
    residual_column,
    out_column,
    residual_out_column,
    weight_column,
    eps,
    offset,
    width,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < width
    # the weight comes while the row does, not after its sum
    gain = tl.load(weight + column * weight_column, mask=inside, other=0.0)
    value = tl.load(x + row * x_row + column * x_column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_row + column * residual_column, mask=inside, other=0.0).to(
            tl.float32
        )
        target = residual_out + row * residual_out_row + column * residual_out_column
        tl.store(target, value.to(residual_out.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    result = value * scale * (offset + gain.to(tl.float32))
    tl.store(out + row * out_row + column * out_column, result.to(out.dtype.element_ty), mask=inside)
