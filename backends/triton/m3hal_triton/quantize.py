"""``quantize``: activations rounded to a format, byte for byte as :mod:`m3hal.formats` has it."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.formats import PLAIN_FORMATS, QTensor
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._encode import e4m3, mxfp4, nvfp4
from m3hal_triton._launch import converts, power_of_two_above

#: columns of one program, of formats whose scales lie close together
COLUMNS = 2048
#: parts of a row that its program holds; longer rows are read twice
HELD = tl.constexpr(4)
#: columns of a part at most
WIDEST = 4096
#: a scale's neighbours, as many as a program has at least
MIN_COLUMNS = 32
_INFINITY = tl.constexpr(0x7F800000)
_FAKE = load("quantize").fake


def quantize(site: Site) -> partial[QTensor]:
    """The callable for a site."""
    return partial(_quantize, site.activation_format)


def _quantize(format: str, x: torch.Tensor, out: QTensor | None = None) -> QTensor:
    result: QTensor = _FAKE(x, activation_format=format) if out is None else out
    if x.numel():
        if format in PLAIN_FORMATS:
            _launch(_plain, COLUMNS, x, result.data)
        elif format.startswith("fp8"):
            assert result.scale is not None
            rows, codes, scales = (t.flatten(0, -2) if t.ndim != 2 else t for t in (x, result.data, result.scale))
            quantize_rows(rows, codes, scales, maximum=240 if format.endswith("240") else 448)
        else:
            assert result.scale is not None
            native = format == "mxfp8" and converts(x.device)
            _launch(_blocks, COLUMNS, x, result.data, result.scale, FORMAT=format, NATIVE=native)
    return result


def quantize_rows(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, given: torch.Tensor | None = None, maximum: int = 448
) -> None:
    """x [R, n] to FP8 codes [R, n] and an fp32 scale for each row, [R] or [R, 1].

    given: the one scale of all rows; None: each row's own, of its largest number.
    """
    width = x.shape[1]
    columns = min(max(power_of_two_above(width) // HELD.value, MIN_COLUMNS), WIDEST)
    _whole_rows[(len(x),)](
        x, codes.view(torch.uint8), scales, given, x.stride(), codes.stride(), scales.stride(0), width,
        MAXIMUM=maximum, COLUMNS=columns, PARTS=triton.cdiv(width, columns),
        NATIVE=maximum == 448 and converts(x.device), num_warps=max(1, min(8, columns // 256)),
    )  # fmt: skip


def _launch(kernel: triton.JITFunction, most: int, x: torch.Tensor, *out: torch.Tensor, **options: object) -> None:
    """A kernel over the rows and the columns of x, whose outputs have as many leading axes."""
    width = x.shape[-1]
    rows, *targets = (t.flatten(0, -2) if t.ndim != 2 else t for t in (x, *out))
    columns = max(MIN_COLUMNS, min(power_of_two_above(width), most))
    kernel[(len(rows), triton.cdiv(width, columns))](
        rows, *targets, rows.stride(), *(t.stride() for t in targets), width,
        COLUMNS=columns, num_warps=max(1, min(4, columns // 512)), **options,
    )  # fmt: skip


@triton.jit
def _plain(x, out, x_strides, out_strides, width, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    number = tl.load(x + row * x_strides[0] + column * x_strides[1], mask=inside, other=0.0)
    tl.store(out + row * out_strides[0] + column * out_strides[1], number.to(out.dtype.element_ty), mask=inside)


@triton.jit
def magnitude(x):
    """int32 that order numbers by their size, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _whole_rows(
    x, data, scales, given, x_strides, data_strides, scale_stride, width,
    MAXIMUM: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The codes that a division gives, without one for each number: a product with the reciprocal of the row's scale is
    corrected by what it leaves."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_strides[0]
    data += row * data_strides[0]
    held, most = (), tl.zeros((COLUMNS,), tl.int32)
    for part in tl.static_range(PARTS):
        number = _part(x, x_strides[1], part, width, COLUMNS)
        most = tl.maximum(most, magnitude(number.to(tl.float32)))
        if PARTS <= HELD:
            held += (number,)
    largest = tl.max(most, 0).to(tl.float32, bitcast=True)
    if given is None:
        scale = tl.div_rn(largest, MAXIMUM + 0.0)
        scale = tl.where(scale == 0.0, 1.0, scale)
    else:
        scale = tl.load(given).to(tl.float32)
    tl.store(scales + row * scale_stride, scale)
    inverse = tl.div_rn(1.0, scale)
    back = 0.0 - inverse
    # where nothing that matters is subnormal, infinite or NaN
    if (scale >= 2.0**-66) & (scale < 2.0**120) & (largest * inverse < float("inf")):
        for part in tl.static_range(PARTS):
            again = (held[part] if PARTS <= HELD else _part(x, x_strides[1], part, width, COLUMNS)).to(tl.float32)
            ratio = again * inverse
            over = tl.fma(ratio, scale, _negative(again))
            ratio = tl.fma(over, back, ratio)  # -0 keeps its sign
            _store(ratio, data, data_strides[1], part, width, COLUMNS, MAXIMUM, NATIVE)
    else:
        for part in tl.static_range(PARTS):
            again = (held[part] if PARTS <= HELD else _part(x, x_strides[1], part, width, COLUMNS)).to(tl.float32)
            _store(tl.div_rn(again, scale), data, data_strides[1], part, width, COLUMNS, MAXIMUM, NATIVE)


@triton.jit
def _negative(x):
    """-x: Triton 3.6 takes it for 0 - x, which has another zero."""
    return (x.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _part(x, stride, part: tl.constexpr, width, COLUMNS: tl.constexpr):
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    return tl.load(x + column * stride, mask=column < width, other=0.0)


@triton.jit
def _store(
    ratio, data, stride, part: tl.constexpr, width, COLUMNS: tl.constexpr, MAXIMUM: tl.constexpr, NATIVE: tl.constexpr
):
    if MAXIMUM != 448:  # comparisons with NaN are false, so a NaN stays
        ratio = tl.where(ratio > MAXIMUM, MAXIMUM, tl.where(ratio < -MAXIMUM, -MAXIMUM, ratio))
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(data + column * stride, e4m3(ratio, NATIVE).to(tl.uint8), mask=column < width)


@triton.jit
def _blocks(
    x, data, scales, x_strides, data_strides, scale_strides, width,
    COLUMNS: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    GROUPS: tl.constexpr = COLUMNS // GROUP
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    number = tl.load(x + row * x_strides[0] + column * x_strides[1], mask=column < width, other=0.0).to(tl.float32)
    grouped = tl.reshape(number, (1, GROUPS, GROUP))
    to = data + row * data_strides[0]
    if FORMAT == "mxfp8":
        code, scale = mxfp8(grouped, NATIVE)
        tl.store(to + column * data_strides[1], tl.reshape(code, (COLUMNS,)).to(tl.uint8), mask=column < width)
    else:
        code, scale = nvfp4(grouped) if FORMAT == "nvfp4" else mxfp4(grouped)
        even, odd = tl.split(tl.reshape(code, (COLUMNS // 2, 2)))
        byte = first // 2 + tl.arange(0, COLUMNS // 2)
        tl.store(to + byte * data_strides[1], (even | (odd << 4)).to(tl.uint8), mask=byte < width // 2)
    group = first // GROUP + tl.arange(0, GROUPS)
    at = scales + row * scale_strides[0] + group * scale_strides[1]
    tl.store(at, tl.reshape(scale, (GROUPS,)).to(tl.uint8), mask=group < width // GROUP)


@triton.jit
def mxfp8(groups, NATIVE: tl.constexpr):
    """Codes [R, G, 32] and scale bytes [R, G], int32, of fp32 [R, G, 32]; the scale with which nothing saturates."""
    amax = tl.max(magnitude(groups), 2)
    # 448 is 1.75 * 2**8
    scale = tl.maximum((amax >> 23) - 8 + tl.where((amax & 0x7FFFFF) > 0x600000, 1, 0), 0)
    scale = tl.where(amax == _INFINITY, 254, tl.where(amax > _INFINITY, 255, scale))
    # 2**(127 - scale), which is subnormal for 254
    inverse = tl.where(scale == 254, 0x400000, (254 - scale) << 23).to(tl.float32, bitcast=True)
    code = e4m3(groups * inverse[:, :, None], NATIVE)
    return tl.where((scale == 255)[:, :, None], 0x7F, code), scale
