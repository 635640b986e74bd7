"""Rotary position embedding of the first ``rotary_dim`` dimensions of each head; the rest passes through.

The two halves of the rotated part form the pairs (NeoX order, not interleaved)::

    out[i]          = x[i] * cos[i] - x[i + half] * sin[i]           i < half = rotary_dim // 2
    out[i + half]   = x[i + half] * cos[i] + x[i] * sin[i]

Source: transformers ``minimax_m3_vl`` (``apply_rotary_pos_emb``).
"""

from __future__ import annotations

from collections.abc import Mapping

from m3hal._lazy import torch
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._traits import EXACT, ROPE_TABLE


def rope_partial(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    rotary_dim: int,
    traits: Mapping[str, str] = EXACT,
) -> torch.Tensor:
    """Rotates every head of every token by the angles of its position.

    Args:
        x: [T, h, D].
        positions: int64 [T], each a row of the table.
        cos_sin: fp32 [max_pos, rotary_dim], cos of ``half`` angles, then their sin; see :func:`rope_table`.
        rotary_dim: dimensions that turn; 64 of 128 in MiniMax-M3.

    Returns:
        [T, h, D] in x's dtype; dimensions from ``rotary_dim`` on are bit-identical to x.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    if traits.get("rope_table") == "bfloat16":
        cos_sin = cos_sin.to(torch.bfloat16)
    cos, sin = cos_sin[positions].to(compute)[:, None].chunk(2, dim=-1)
    first, second = x[..., :rotary_dim].to(compute).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], dim=-1)


def rope_table(max_pos: int, rotary_dim: int, theta: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """fp32 [max_pos, rotary_dim]: cos, then sin, of ``position * theta ** (-2 i / rotary_dim)``.

    The angles are fp32 products, as in every peer: at position 1e6 an fp64 angle would differ by 0.03 rad.
    """
    inverse = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim)
    angle = torch.arange(max_pos, dtype=torch.float32, device=device)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def fake(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, **_: object) -> torch.Tensor:
    """Empty and contiguous, like ``x``."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


OPERATOR = Operator(
    name="rope_partial",
    kind="core",
    reference=rope_partial,
    fake=fake,
    numeric=Numeric("U1", "of the larger of the pair; dimensions past rotary_dim bit-exact"),
    sites=("dense_attention", "sparse_attention", "drafter"),
    traits=(ROPE_TABLE,),
    source="transformers minimax_m3_vl",
)
