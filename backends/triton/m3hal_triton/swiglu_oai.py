"""``swiglu_oai``: the clamped gated activation."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._launch import LOG2_E, after, common_power_of_two, launched_early, power_of_two_above

#: of a program: columns at most, elements, warps. Columns divide a row's length where its factors of two leave
#: MIN_COLUMNS
COLUMNS, MIN_COLUMNS, ELEMENTS, WARPS = 1024, 128, 1024, 4
#: looked up here: torch.compile looks into the callable, and can't follow a lookup
_FAKE = load("swiglu_oai").fake


def swiglu_oai(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_activate, site)


def _activate(site: Site, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    out = _FAKE(gate_up) if out is None else out
    if out.numel():
        width, early = out.shape[-1], launched_early(out.device)
        rows, target = gate_up.reshape(-1, 2 * width), out.view(-1, width)
        columns = common_power_of_two(width)
        columns = min(COLUMNS, columns if columns >= MIN_COLUMNS else power_of_two_above(width))
        many = max(1, ELEMENTS // columns)
        _activate_tile[(-(-target.shape[0] // many), -(-width // columns))](
            rows, target, *rows.stride(), *target.stride(), target.shape[0], width,
            -site.alpha * LOG2_E, site.beta, site.limit, ROWS=many, COLUMNS=columns, EARLY=early,
            num_warps=WARPS, **after(early),
        )  # fmt: skip
    return out


@triton.jit
def _activate_tile(
    x, out, x_row, x_column, out_row, out_column, rows, width, power, beta, limit,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < width)
    at = x + row * x_row + column * x_column
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width * x_column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    divisor = 1.0 + tl.exp2(gate * power)
    # two units of fp32 off are nothing to bf16
    gate = gate / divisor if out.dtype.element_ty == tl.bfloat16 else tl.div_rn(gate, divisor)
    tl.store(out + row * out_row + column * out_column, (gate * (up + beta)).to(out.dtype.element_ty), mask=inside)
