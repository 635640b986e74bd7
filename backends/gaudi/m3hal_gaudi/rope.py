"""``rope_partial`` through Habana's rotary embedding of halves, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from habana_frameworks.torch.hpex.kernels import RotaryPosEmbeddingHelperV1

from m3hal.ops import load
from m3hal.shape import Site

_turn: Callable[..., torch.Tensor] = RotaryPosEmbeddingHelperV1.apply
_like = load("rope_partial").fake


def rope_partial(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_rotate, site.rotary_dim)


def _rotate(
    rotary_dim: int,
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = _like(x, positions, cos_sin) if out is None else out
    if x.numel():
        cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)  # [T, 1, half] each
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        out[..., :rotary_dim].copy_(_turn(x[..., :rotary_dim].float(), cos, sin, 0))
        out[..., rotary_dim:].copy_(x[..., rotary_dim:])
    return out
