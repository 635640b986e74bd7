"""Products whose depth several programs share: each writes its part of the sum in fp32, and a kernel adds them up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3hal_triton._launch import after, power_of_two_above, programmatic

#: elements of the output of one program that adds parts up
SUMMED = 512


def shared_out(steps: int, shares: int) -> tuple[int, int]:
    """Steps of each program, and how many programs that makes of about ``shares``."""
    each = triton.cdiv(steps, max(1, min(steps, shares)))
    return each, triton.cdiv(steps, each)


def add_up(made: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the sum of made [P, T, N], fp32 and dense, to out [T, N]."""
    parts, tokens, rows = made.shape
    early = programmatic(out.device)
    _sum[(triton.cdiv(tokens * rows, SUMMED),)](
        made, out, out.stride(), parts, tokens * rows, rows,
        PARTS=power_of_two_above(parts), SUMMED=SUMMED, EARLY=early, num_warps=4, **after(early),
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "count"])
def _sum(
    made, out, out_strides, parts, count, rows, PARTS: tl.constexpr, SUMMED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SUMMED + tl.arange(0, SUMMED)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((SUMMED,), tl.float32)
    for part in tl.static_range(PARTS):  # all loads in flight at once
        there = at < tl.where(parts > part, count, 0)
        total += tl.load(made + part * count.to(tl.int64) + at, mask=there, other=0.0)
    to = out + at // rows * out_strides[0] + at % rows * out_strides[1]
    tl.store(to, total.to(out.dtype.element_ty), mask=at < count)
