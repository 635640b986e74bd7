"""``rms_norm`` and ``add_rms_norm``: one row a program, read once."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._launch import after, common_power_of_two, launched_early, power_of_two_above, power_of_two_below

#: of a program, which is a row: columns of each warp at least, and parts that leave no lane idle at most
COLUMNS_PER_WARP, MOST_WARPS, MOST_PARTS = 384, 16, 4
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
    padded, early = common_power_of_two(width), launched_early(x.device)
    if width > MOST_PARTS * padded:
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
        PARTS=-(-width // padded),
        ADD=add,
        EARLY=early,
        num_warps=min(MOST_WARPS, power_of_two_below(width // COLUMNS_PER_WARP)),
        **after(early),
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
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values, gains, squares = (), (), tl.zeros((PADDED,), tl.float32)
    for part in tl.static_range(PARTS):
        column = part * PADDED + tl.arange(0, PADDED)
        inside = column < width
        # the weight comes while the row does, not after its sum
        gains += (tl.load(weight + column * weight_column, mask=inside, other=0.0),)
        value = tl.load(x + row * x_row + column * x_column, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            at = residual + row * residual_row + column * residual_column
            value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        values += (value,)
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    for part in tl.static_range(PARTS):
        column = part * PADDED + tl.arange(0, PADDED)
        inside = column < width
        if ADD:
            at = residual_out + row * residual_out_row + column * residual_out_column
            tl.store(at, values[part].to(residual_out.dtype.element_ty), mask=inside)
        result = values[part] * scale * (offset + gains[part].to(tl.float32))
        tl.store(out + row * out_row + column * out_column, result.to(out.dtype.element_ty), mask=inside)
