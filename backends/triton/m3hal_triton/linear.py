"""``linear``: products with a weight in any storage format, and the router's, whose weight is fp32.

Stored weights enter with the numbers that they stand for: a code times its block's scale has at most six significant
bits, which bf16 holds, and factors of whole rows or of the whole weight are applied to the sums. ``linear_fp8`` rounds
activations to FP8 as well, by declaration.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.formats import PLAIN_FORMATS, QSpec, QTensor
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._gate import gate
from m3hal_triton._launch import DOT_PRECISION, multiprocessors
from m3hal_triton._parts import add_up, shared_out
from m3hal_triton._stored import block_scales, e2m1_pairs, e4m3_values
from m3hal_triton.quantize import quantize_rows

#: tiles of neighbouring rows of the output that run side by side, and share what they read
SIDE_BY_SIDE = 8
#: (tokens up to which; a tile's tokens, rows of the weight, depth; warps, stages): few tokens take narrow tiles, of
#: which there are more. Of bf16 products, of fp32's, and of FP8's
Tile = tuple[float, int, int, int, int, int]
TILES: tuple[Tile, ...] = ((16, 16, 16, 256, 2, 3), (64, 64, 32, 128, 4, 4), (float("inf"), 256, 128, 64, 8, 3))
WIDE: tuple[Tile, ...] = ((16, 16, 32, 64, 4, 2), (float("inf"), 32, 32, 32, 4, 2))
NARROW: tuple[Tile, ...] = ((16, 16, 32, 128, 4, 4), (64, 64, 64, 128, 4, 3), (float("inf"), 128, 128, 128, 8, 3))
#: tokens whose tile serves any number of them, where all are to have the same
STEADY = 64
_FAKE = load("linear").fake
Weight = torch.Tensor | QTensor


def linear(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_linear, False, False)


def batch_invariant(site: Site) -> partial[torch.Tensor]:
    """The callable for a site, with one tile for any number of tokens: sums of a row have one order."""
    return partial(_linear, False, True)


def linear_fp8(site: Site) -> partial[torch.Tensor]:
    """The callable for a site whose weight is FP8 by rows; activations are rounded to FP8, a scale for each token."""
    return partial(_linear, True, False)


def _linear(
    narrow: bool, steady: bool, x: torch.Tensor, weight: Weight, out: torch.Tensor | None = None
) -> torch.Tensor:
    result: torch.Tensor = _FAKE(x, weight) if out is None else out
    if not result.numel():
        return result
    if isinstance(weight, torch.Tensor) and weight.dtype == torch.float32 and x.dtype == torch.bfloat16:
        gate(x, weight, result, steady)
        return result
    scale_x = None
    if narrow and isinstance(weight, QTensor):
        codes, scale_x = x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(len(x), 1, dtype=torch.float32)
        quantize_rows(x, codes, scale_x)
        x = codes
    _launch(x, scale_x, weight, result, STEADY if steady else None)
    return result


def _launch(
    x: torch.Tensor, scale_x: torch.Tensor | None, weight: Weight, out: torch.Tensor, tokens_as: int | None
) -> None:
    """x bf16, fp32, or with scale_x [T, 1] FP8; out [T, N]. tokens_as: whose tile it takes; None: its own."""
    q = weight if isinstance(weight, QTensor) else QTensor(weight, QSpec(str(weight.dtype).removeprefix("torch.")))
    format, data, scale = q.spec.format, q.data, q.scale
    if format not in PLAIN_FORMATS:
        data = data.view(torch.uint8)
    if scale is not None and scale.dtype != torch.float32:
        scale = scale.view(torch.uint8)
    by_row = scale is not None and scale.dtype == torch.float32
    tokens, width, rows = *x.shape, out.shape[1]
    whole = None if q.global_scale is None else q.global_scale.reshape(-1)
    ladder = WIDE if x.dtype == torch.float32 else TILES if scale_x is None else NARROW
    _, block_m, block_n, block_k, warps, stages = next(t for t in ladder if (tokens_as or tokens) <= t[0])
    if format == "nvfp4":  # whose scales take registers
        block_m = min(block_m, 128)
    tiles, steps = triton.cdiv(tokens, block_m) * triton.cdiv(rows, block_n), triton.cdiv(width, block_k)
    # what few tokens wait for is memory, and more programs ask it for more at a time
    programs = multiprocessors(x.device) * (4 if tokens <= 64 else 1)
    each, parts = shared_out(steps, 1 if tokens_as else min(programs // tiles, steps // 2))
    made = out if parts == 1 else out.new_empty(parts, tokens, rows, dtype=torch.float32)
    _project[(tiles, parts)](
        x, scale_x, data, scale, whole, made, x.stride(), 0 if scale_x is None else scale_x.stride(0), data.stride(),
        (0, 0) if scale is None else scale.stride(), 0 if whole is None or len(whole) == 1 else whole.stride(0),
        made.stride()[-2:], 0 if parts == 1 else made.stride(0), tokens, rows, width, each * block_k,
        FORMAT=format, GROUP=0 if scale is None or by_row else width // scale.shape[1], BY_ROW=by_row,
        PRECISION=DOT_PRECISION, SIDE_BY_SIDE=SIDE_BY_SIDE, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        add_up(made, out)


@triton.jit
def _weights(
    data, scales, data_strides, scale_strides, row, first, inside, width,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """[N, BLOCK_K] columns from ``first`` on, without what is common to a row; row: int64 [N, 1], inside: [N, 1]."""
    column = first + tl.arange(0, BLOCK_K)[None, :]
    at = data + row * data_strides[0]
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        byte = first // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        number = e2m1_pairs(tl.load(at + byte * data_strides[1], mask=inside & (byte < width // 2), other=0), COMPUTE)
    else:
        number = tl.load(at + column * data_strides[1], mask=inside & (column < width), other=0)
        if FORMAT == "fp8_e4m3" and tl.float8e4nv == COMPUTE:
            number = number.to(tl.float8e4nv, bitcast=True)
        elif FORMAT == "fp8_e4m3" or FORMAT == "fp8_e4m3_240" or FORMAT == "mxfp8":
            number = e4m3_values(number, 240 if FORMAT == "fp8_e4m3_240" else 448, COMPUTE)
    if GROUP > 0:
        group = first // GROUP + tl.arange(0, BLOCK_K // GROUP)[None, :]
        there = inside & (group < width // GROUP)
        scale = block_scales(
            tl.load(scales + row * scale_strides[0] + group * scale_strides[1], mask=there, other=0), FORMAT
        )
        grouped = tl.reshape(number, (number.shape[0], BLOCK_K // GROUP, GROUP)) * scale.to(COMPUTE)[:, :, None]
        number = tl.reshape(grouped, (number.shape[0], BLOCK_K))
    return number.to(COMPUTE)


@triton.jit(do_not_specialize=["tokens"])
def _project(
    x, scale_x, data, scales, whole, out, x_strides, scale_x_stride, data_strides, scale_strides, whole_stride,
    out_strides, part_stride, tokens, rows, width, depth_each,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BY_ROW: tl.constexpr, PRECISION: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    COMPUTE: tl.constexpr = x.dtype.element_ty
    over_m, over_n = tl.cdiv(tokens, BLOCK_M), tl.cdiv(rows, BLOCK_N)
    share = tl.program_id(0) // (SIDE_BY_SIDE * over_n) * SIDE_BY_SIDE
    beside = tl.minimum(over_m - share, SIDE_BY_SIDE)
    within = tl.program_id(0) % (SIDE_BY_SIDE * over_n)
    token = ((share + within % beside) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    row = (within // beside * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    begin = tl.multiple_of(tl.program_id(1) * depth_each, BLOCK_K)
    for first in range(begin, tl.minimum(begin + depth_each, width), BLOCK_K):
        column = first + depth
        there = (token < tokens) & (column < width)
        left = tl.load(x + token * x_strides[0] + column * x_strides[1], mask=there, other=0.0)
        right = _weights(
            data, scales, data_strides, scale_strides, row[:, None], first, row[:, None] < rows, width,
            FORMAT, GROUP, BLOCK_K, COMPUTE,
        )  # fmt: skip
        if tl.float8e4nv == COMPUTE:  # Hopper adds FP8 products up in few bits: no longer than within a tile
            total += tl.dot(left, tl.trans(right))
        else:
            total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    if BY_ROW:
        total *= tl.load(scales + row * scale_strides[0], mask=row < rows, other=0.0)[None, :]
    if whole is not None:
        total *= tl.load(whole + row * whole_stride, mask=row < rows, other=0.0)[None, :]
    if scale_x is not None:
        total *= tl.load(scale_x + token * scale_x_stride, mask=token < tokens, other=0.0)
    to = out + tl.program_id(1) * part_stride + token * out_strides[0] + row[None, :] * out_strides[1]
    tl.store(to, total.to(out.dtype.element_ty), mask=(token < tokens) & (row[None, :] < rows))
