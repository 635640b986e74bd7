"""Quantising and dequantising, byte for byte as the definitions."""

from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, sparse_site
from m3hal_triton.dequantize import dequantize
from m3hal_triton.quantize import quantize

from m3hal import formats
from m3hal.formats import QTensor, nvfp4, spec_of
from m3hal.ops import load

FORMATS = ("float32", "bfloat16", "fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def _numbers(dtype):
    """[9, 96]: sizes from 1e-38 to 1e9, zeros, ties, subnormals, infinities and NaN."""
    x = torch.randn(9, 96) * torch.exp(8 * torch.randn(9, 1))
    x[1, 5], x[2, 40], x[4, 95], x[5] = float("nan"), float("inf"), float("-inf"), float("nan")
    x[6, :32] = torch.tensor([448.0, 449.0, 1.75, -1.8, -0.0, 5.0, 2.5, 0.25] * 4)
    x[7], x[8] = 0, x[8] * 1e-38
    return x.to(dtype).to(DEVICE)


def _equal(ours, exact):
    """Bit for bit, but for which NaN a float is."""
    if ours is None or exact is None:
        return ours is exact
    return ours.dtype == exact.dtype and bool(((ours == exact) | (ours.isnan() & exact.isnan())).all())


def _poisoned(q):
    return replace(
        q, data=torch.full_like(q.data, 119), scale=None if q.scale is None else torch.full_like(q.scale, 119)
    )


@DTYPES
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("view", ["dense", "transposed", "three axes", "every other"])
def test_quantize(dtype, format, view):
    """Every kind of number, as rows of any stride, over poison."""
    x = _numbers(dtype)
    x = {
        "dense": lambda: x,
        "transposed": lambda: x.T.contiguous().T,
        "three axes": lambda: x.view(3, 3, 96),
        "every other": lambda: torch.stack([x, torch.full_like(x, 3e38)], -1)[..., 0],
    }[view]()
    op = load("quantize")
    exact = op.reference(x, activation_format=format)
    site = replace(sparse_site(dtype), activation_format=format)
    ours = quantize(site)(x, out=_poisoned(op.fake(x, activation_format=format)))
    assert ours.spec == exact.spec
    assert _equal(ours.data, exact.data)
    assert _equal(ours.scale, exact.scale)


def _codes(x, format):
    """Ours and the definition's, whose divisions are the CPU's."""
    site = replace(sparse_site(x.dtype), activation_format=format)
    exact = load("quantize").reference(x, activation_format=format)
    return quantize(site)(x.to(DEVICE)).data.view(torch.uint8).cpu(), exact.data.view(torch.uint8)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e4m3_240"])
def test_between_two_codes(format):
    """fp32 numbers in the middle of two codes and next to it, under scales of all sizes: the codes of a division."""
    maximum = 240 if format.endswith("240") else 448
    code = formats.e4m3.decode(torch.arange(127, dtype=torch.uint8), maximum)
    middle = ((code[1:] + code[:-1]) / 2)[code[1:] <= maximum]
    largest = torch.rand(40, 1) * torch.exp2(torch.linspace(-140, 127, 40)[:, None])
    middle = (middle * (largest / maximum)).view(torch.int32)
    beside = [(middle + step).clamp(min=0).view(torch.float32) for step in (-2, -1, 0, 1, 2)]
    x = torch.cat([largest, *beside, *(-t for t in beside)], 1).clamp(-largest, largest)
    assert torch.equal(*_codes(x, format))


def test_every_bf16_number():
    """All that are finite, under the scales of some of them."""
    numbers = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for largest in (3.3e38, 1.3, 3e-30):
        x = torch.where(numbers.abs() <= largest, numbers, 0.0).view(16, -1)
        x = torch.cat([torch.full((16, 1), largest, dtype=x.dtype), x], 1)
        assert torch.equal(*_codes(x, "fp8_e4m3"))


@pytest.mark.parametrize("width", [1, 33, 640, 4096, 7168, 17000])
def test_rows_of_any_width(width):
    """In FP8, whose scale is of a whole row: one part of it to five, the last one read twice."""
    x = torch.randn(3, width).cumsum(1)
    x[1, :-1] = 0
    assert torch.equal(*_codes(x, "fp8_e4m3"))


@DTYPES
@pytest.mark.parametrize("format", FORMATS)
def test_dequantize(dtype, format):
    """Codes of every kind of number, dense and with doubled strides, over poison."""
    op, site = load("dequantize"), sparse_site(dtype)
    name = str(dtype).removeprefix("torch.")
    q = formats.quantize(_numbers(torch.float32), spec_of(format))
    for given in (q, replace(q, data=torch.stack([q.data, q.data.flip(0)], 1)[:, 0])):
        out = torch.full((9, 96), 3e38, dtype=dtype, device=DEVICE)
        assert _equal(dequantize(site)(given, out=out), op.reference(given, dtype=name))


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e4m3_240", "mxfp8"])
def test_every_code(format):
    """All 256 bytes under one scale, the infinities and NaN of either range too."""
    data = torch.arange(256, device=DEVICE).to(torch.uint8).view(8, 32)
    scale = torch.full((8, 1), 0.375, device=DEVICE) if format.startswith("fp8") else torch.full_like(data[:, :1], 130)
    q = QTensor(data, spec_of(format), scale)
    assert _equal(dequantize(sparse_site(torch.float32))(q), load("dequantize").reference(q, dtype="float32"))


def test_global_scales():
    """One for all, and one for each leading entry, in three axes."""
    x = torch.randn(2, 3, 96, device=DEVICE)
    for own in (0, 1):
        q = nvfp4.quantize(x, nvfp4.global_scale_of(x, own=own))
        ours = dequantize(sparse_site(torch.float32))(q)
        assert torch.equal(ours, load("dequantize").reference(q, dtype="float32"))


@pytest.mark.parametrize("format", FORMATS)
def test_no_tokens(format):
    """Zero tokens give empty codes, and those empty numbers."""
    site = replace(sparse_site(torch.bfloat16), activation_format=format)
    q = quantize(site)(torch.empty(0, 96, dtype=torch.bfloat16, device=DEVICE))
    assert len(q.data) == 0
    assert dequantize(site)(q).shape == (0, 96)
