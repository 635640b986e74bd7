"""``rms_norm`` and ``add_rms_norm`` through Habana's FusedRMSNorm, in fp32 around it.

In bf16 it would take the weights as 1 + w rounded to bf16, and the sum rounded before the norm; in fp32 both are exact,
and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from habana_frameworks.torch.hpex.normalization import FusedRMSNorm

from m3hal.ops import load
from m3hal.shape import Site

_row_norm: Callable[..., torch.Tensor] = FusedRMSNorm.apply
# here, because torch.compile looks inside the calls below
_like_norm, _like_pair = load("rms_norm").fake, load("add_rms_norm").fake


def rms_norm(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_norm, site.eps, site.weight_offset)


def add_rms_norm(site: Site) -> partial[tuple[torch.Tensor, torch.Tensor]]:
    """The callable for a site."""
    return partial(_add_norm, site.eps, site.weight_offset)


def _norm(
    eps: float, offset: float, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = _like_norm(x, weight) if out is None else out
    if x.numel():
        out.copy_(_normalized(x.float(), weight, eps, offset))
    return out


def _add_norm(
    eps: float,
    offset: float,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor]
    result = _like_pair(x, residual, weight) if out is None else out
    if x.numel():
        total = x.float() + residual.float()
        result[0].copy_(_normalized(total, weight, eps, offset))
        result[1].copy_(total)
    return result


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """fp32, like ``x``. The kernel takes three axes."""
    rows: torch.Tensor = _row_norm(x.reshape(1, -1, x.shape[-1]), weight.float() + offset, eps)
    return rows.view(x.shape)
