"""``rms_norm`` and ``add_rms_norm`` through aiter's norms, which take rows [rows, n] and do not check their strides."""

from __future__ import annotations

from functools import partial

import torch
from aiter.ops.rmsnorm import rmsnorm, rmsnorm2d_fwd_with_add

from m3hal.ops import load
from m3hal.shape import Site


def rms_norm(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_norm, site.eps, site.weight_offset == 1.0)


def add_rms_norm(site: Site) -> partial[tuple[torch.Tensor, torch.Tensor]]:
    """The callable for a site."""
    return partial(_add_norm, site.eps, site.weight_offset == 1.0)


def _norm(
    eps: float, gemma: bool, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = load("rms_norm").fake(x, weight) if out is None else out
    if x.numel():
        rmsnorm(out.view(-1, x.shape[-1]), _rows(x), weight, eps, gemma)
    return out


def _add_norm(
    eps: float,
    gemma: bool,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor]
    result = load("add_rms_norm").fake(x, residual, weight) if out is None else out
    if x.numel():
        normed, summed = (tensor.view(-1, x.shape[-1]) for tensor in result)
        rmsnorm2d_fwd_with_add(normed, _rows(x), _rows(residual), summed, weight, eps, gemma)
    return result


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, n], dense within a row. Heads inside a wider row lie at two strides, which takes a copy."""
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
