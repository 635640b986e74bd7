"""Products and arithmetic of bf16 in kernels, which the interpreter as shipped gets wrong."""

import pytest
import torch
from attention_cases import DEVICE
from cure_kernels import arithmetic, combined, product, scaled_product, shifted

from m3hal import formats
from m3hal.formats import spec_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_dot_is_the_product_of_the_values(dtype):
    """Exact products, fp32 accumulation."""
    a, b = (torch.randn(32, 32, device=DEVICE).to(dtype) for _ in range(2))
    out = torch.empty(32, 32, device=DEVICE)
    product[(1,)](a, b, out, SIZE=32)
    exact = a.double() @ b.double()
    assert (out - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_bf16_arithmetic_means_values():
    """Compared and computed as numbers, rounded to bf16."""
    a, b = (torch.randn(64, device=DEVICE).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    arithmetic[(1,)](a, b, out, SIZE=64)
    exact = torch.where(a > b, a.double() * b.double() + a.double(), a.double() - b.double())
    assert (out.double() - exact).abs().max() <= 2**-6 * exact.abs().max()


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_products_of_blocks(format):
    """Scales in E4M3 are not taken for E8M0."""
    if format == "nvfp4" and DEVICE != "cpu":
        pytest.skip("triton emulates no E4M3 scales before 3.8")
    a, b = (formats.quantize(torch.randn(32, 128), spec_of(format)) for _ in range(2))
    given = [t.to(DEVICE) for q in (a, b) for t in (q.data.view(torch.uint8), q.scale)]
    if format == "nvfp4":
        given[1], given[3] = given[1].view(torch.float8_e4m3fn), given[3].view(torch.float8_e4m3fn)
    out = torch.empty(32, 32, device=DEVICE)
    code = "e4m3" if format == "mxfp8" else "e2m1"
    scaled_product[(1,)](*given, out, SIZE=32, BYTES=given[0].shape[1], GROUPS=given[1].shape[1], CODE=code)
    exact = formats.dequantize(a, torch.float64) @ formats.dequantize(b, torch.float64).T
    assert (out.cpu() - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_reduction_by_a_function_of_ones_own(axis, keep):
    """In the order of the axis, one slice after the other, several numbers at once; NaN is the function's to judge."""
    x = torch.randn(4, 8, device=DEVICE)
    x[2, 3] = torch.nan
    out, index = torch.empty(8 if axis == 0 else 4, device=DEVICE), torch.empty(8 if axis == 0 else 4, device=DEVICE)
    index = index.int()
    combined[(1,)](x, out, index, AXIS=axis, ROWS=4, COLUMNS=8, KEEP=keep)
    slices = x.cpu().unbind(axis)
    total, best = slices[0], slices[0]
    places = torch.arange(32).view(4, 8).unbind(axis)
    place = places[0]
    for part, where in zip(slices[1:], places[1:], strict=True):
        total = torch.where(part.isnan(), total, torch.maximum(total, part) + 0.5 * torch.minimum(total, part))
        best, place = torch.where(part > best, part, best), torch.where(part > best, where, place)
    if DEVICE == "cpu":  # a GPU combines in another order, and this function is not associative
        assert torch.allclose(out, total)
    assert torch.equal(index.cpu(), place.int())


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU may read a neighbour's memory and say nothing")
def test_reads_outside_of_the_arguments_are_refused():
    """One element past the end of a tensor, unless it is masked out."""
    x, out = torch.randn(64), torch.empty(64)
    shifted[(1,)](x, out, 1, SIZE=64, MASKED=True)
    assert torch.equal(out[:-1], x[1:])
    with pytest.raises(Exception, match="shifted loads 1 of 64 elements outside"):
        shifted[(1,)](x, out, 1, SIZE=64, MASKED=False)
