"""``swiglu_oai``: the clamped gated activation."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._launch import power_of_two_above

COLUMNS = 1024
#: looked up here: torch.compile looks into the callable, and can't follow a lookup
_FAKE = load("swiglu_oai").fake


def swiglu_oai(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_activate, site)


def _activate(site: Site, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    out = _FAKE(gate_up) if out is None else out
    if out.numel():
        width = out.shape[-1]
        rows, target = gate_up.reshape(-1, 2 * width), out.view(-1, width)
        _rows[(rows.shape[0], -(-width // COLUMNS))](
            rows, target, *rows.stride(), *target.stride(), width, site.alpha, site.beta, site.limit,
            COLUMNS=min(COLUMNS, power_of_two_above(width)), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _rows(x, out, x_row, x_column, out_row, out_column, width, alpha, beta, limit, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + row * x_row + column * x_column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + (width + column) * x_column, mask=inside, other=0.0).to(tl.float32)
    # comparisons with NaN are false, so a NaN stays
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    result = tl.div_rn(gate, 1.0 + tl.exp(-alpha * gate)) * (up + beta)
    tl.store(out + row * out_row + column * out_column, result.to(out.dtype.element_ty), mask=inside)
