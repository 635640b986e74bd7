"""``rms_norm`` and ``add_rms_norm`` through FlashInfer's norms.

Its kernels read bf16, compute in fp32 and round once; the fused one normalises the sum before it is rounded, as the
definition does. They take dense rows, and weights in the activations' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from flashinfer.norm import gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm

from m3hal.ops import load
from m3hal.shape import Site


def rms_norm_gemma(site: Site) -> partial[torch.Tensor]:
    """The callable for a site whose weights are stored around zero."""
    return partial(_norm, gemma_rmsnorm, site.eps)


def rms_norm_plain(site: Site) -> partial[torch.Tensor]:
    """The callable for a site whose weights are stored as they are."""
    return partial(_norm, rmsnorm, site.eps)


def add_rms_norm_gemma(site: Site) -> partial[tuple[torch.Tensor, torch.Tensor]]:
    """The callable for a site whose weights are stored around zero."""
    return partial(_add_norm, site.eps)


def _norm(
    kernel: Callable[..., torch.Tensor],
    eps: float,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = load("rms_norm").fake(x, weight) if out is None else out
    if x.numel():
        rows = _rows(x)
        kernel(rows, weight, eps=eps, out=out.view(rows.shape))
    return out


def _add_norm(
    eps: float,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel works in place and the definition does not, so it gets copies: two more writes of a row."""
    result: tuple[torch.Tensor, torch.Tensor]
    result = load("add_rms_norm").fake(x, residual, weight) if out is None else out
    if x.numel():
        normed, summed = result
        normed.copy_(x)
        summed.copy_(residual)
        gemma_fused_add_rmsnorm(_rows(normed), _rows(summed), weight, eps=eps)
    return result


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, n]; strided rows and heads [T, h, n] stay as they are, which the kernels take."""
    return x.reshape(-1, x.shape[-1]) if x.is_contiguous() or x.ndim > 3 else x
