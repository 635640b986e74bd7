"""``dequantize``: codes times scales, in fp32 and rounded once."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.formats import PLAIN_FORMATS, QTensor
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._launch import power_of_two_above
from m3hal_triton._stored import block_scales, e2m1_pairs, e4m3_values

COLUMNS = 2048
#: columns of a scale's group, at most
GROUP = 32
_FAKE = load("dequantize").fake


def dequantize(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_dequantize, site.dtype)


def _dequantize(dtype: str, q: QTensor, out: torch.Tensor | None = None) -> torch.Tensor:
    result: torch.Tensor = _FAKE(q, dtype=dtype) if out is None else out
    if not result.numel():
        return result
    width = result.shape[-1]
    plain = q.spec.format in PLAIN_FORMATS
    data = q.data if plain else q.data.view(torch.uint8)
    scale = None if q.scale is None else q.scale if q.scale.dtype == torch.float32 else q.scale.view(torch.uint8)
    whole = q.global_scale
    if whole is not None:  # one for all rows, or one for each
        whole = whole.broadcast_to((*result.shape[:-1], 1)).flatten(0, -2)
    data, target, scale = (t.flatten(0, -2) if t is not None and t.ndim != 2 else t for t in (data, result, scale))
    columns = max(GROUP, min(power_of_two_above(width), COLUMNS))
    _rows[(len(target), triton.cdiv(width, columns))](
        data, scale, whole, target, data.stride(), (0, 0) if scale is None else scale.stride(),
        0 if whole is None else whole.stride(0), target.stride(), width,
        GROUP=0 if scale is None else width // scale.shape[1], FORMAT=q.spec.format, COLUMNS=columns,
        num_warps=max(1, min(4, columns // 512)),
    )  # fmt: skip
    return result


@triton.jit
def _rows(
    data, scales, whole, out, data_strides, scale_strides, whole_stride, out_strides, width,
    GROUP: tl.constexpr, FORMAT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inside = column < width
    at = data + row * data_strides[0]
    if FORMAT == "mxfp4" or FORMAT == "nvfp4":
        byte = first // 2 + tl.arange(0, COLUMNS // 2)
        number = e2m1_pairs(tl.load(at + byte * data_strides[1], mask=byte < width // 2, other=0), tl.float32)
    else:
        code = tl.load(at + column * data_strides[1], mask=inside, other=0)
        if FORMAT == "float32" or FORMAT == "bfloat16" or FORMAT == "float64":
            number = code
        else:
            number = e4m3_values(code, 240 if FORMAT == "fp8_e4m3_240" else 448, tl.float32)
    if scales is not None:
        scale = tl.load(scales + row * scale_strides[0] + column // GROUP * scale_strides[1], mask=inside, other=0)
        number = number * (scale if FORMAT == "fp8_e4m3" or FORMAT == "fp8_e4m3_240" else block_scales(scale, FORMAT))
    if whole is not None:
        number = number * tl.load(whole + row * whole_stride)
    tl.store(out + row * out_strides[0] + column * out_strides[1], number.to(out.dtype.element_ty), mask=inside)
