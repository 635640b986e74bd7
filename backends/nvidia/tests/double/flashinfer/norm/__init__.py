"""bf16 rows in, fp32 in between, one rounding out; dense rows only."""

from typing import Optional

import torch


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: Optional[torch.Tensor] = None,
    enable_pdl: Optional[bool] = None,
) -> torch.Tensor:
    return _norm(input, weight, eps, out, 0.0)


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: Optional[torch.Tensor] = None,
    enable_pdl: Optional[bool] = None,
) -> torch.Tensor:
    return _norm(input, weight, eps, out, 1.0)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: Optional[bool] = None,
) -> None:
    _check(input, weight, axes=(2,))
    _check(residual, weight, axes=(2,))
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(_normalized(total, weight, eps, 1.0))


def _norm(x, weight, eps, out, offset):
    _check(x, weight, axes=(2, 3))
    out = torch.empty_like(x) if out is None else out
    assert out.shape == x.shape and out.dtype == x.dtype and out.stride(-1) == 1
    return out.copy_(_normalized(x.float(), weight, eps, offset))


def _normalized(x, weight, eps, offset):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)


def _check(x, weight, axes):
    assert x.ndim in axes and x.numel() and x.dtype == weight.dtype == torch.bfloat16
    assert x.stride(-1) == 1 and weight.stride(-1) == 1 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
