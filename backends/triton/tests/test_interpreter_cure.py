"""Products and arithmetic of bf16 in kernels, which the interpreter as shipped gets wrong."""

import pytest
import torch
from attention_cases import DEVICE
from cure_kernels import arithmetic, product


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
