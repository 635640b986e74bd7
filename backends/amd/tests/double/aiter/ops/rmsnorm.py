"""bf16 rows [rows, n] by their row stride, fp32 in between, one rounding out; the last axis is taken to be dense."""

import torch
from torch import Tensor


def rmsnorm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float, gemma_norm: bool = False) -> None:
    _check(out, input, weight)
    out.copy_(_normalized(input.float(), weight, epsilon, gemma_norm))


def rmsnorm2d_fwd_with_add(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    epsilon: float,
    gemma_norm: bool = False,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    _check(out, input, weight)
    _check(residual_out, residual_in, weight)
    total = input.float() + residual_in.float()
    residual_out.copy_(total)
    out.copy_(_normalized(total, weight, epsilon, gemma_norm))


def _normalized(x, weight, eps, gemma):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + (1.0 if gemma else 0.0))


def _check(out, x, weight):
    assert x.ndim == out.ndim == 2 and x.shape == out.shape and x.numel() and x.shape[-1] <= 8192
    assert x.dtype == out.dtype == weight.dtype == torch.bfloat16
    assert x.stride(-1) == out.stride(-1) == weight.stride(-1) == 1  # aiter does not check, and reads other numbers
