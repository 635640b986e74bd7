"""Adds the residual and normalises the sum, which is not rounded in between.

    sum          = x + residual                                  in fp32
    out          = rms_norm(sum)
    residual_out = sum

Source: vLLM IR ``fused_add_rms_norm``. Implementations that round the sum first (transformers, Gaudi) say so with the
trait ``add_norm_round``: a fifth of their bf16 outputs differ, by one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Mapping

from m3hal._lazy import torch
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._traits import EXACT
from m3hal.ops.rms_norm import normalize


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    weight_offset: float,
    traits: Mapping[str, str] = EXACT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual addition and norm over the last axis.

    Args:
        x: [..., n], what the previous block adds to the residual stream.
        residual: [..., n].
        weight, eps, weight_offset: as in ``rms_norm``.

    Returns:
        out [..., n] in x's dtype, and the new residual [..., n] in the residual's dtype, rounded once. Neither input
        is written.
    """
    compute = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    total = x.to(compute) + residual.to(compute)
    residual_out = total.to(residual.dtype)
    if traits.get("add_norm_round") == "bfloat16":
        total = total.to(torch.bfloat16).to(compute)
    return normalize(total, weight, eps, weight_offset).to(x.dtype), residual_out


def fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty and contiguous, one like ``x``, one like ``residual``."""
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(residual.shape, dtype=residual.dtype, device=residual.device),
    )


OPERATOR = Operator(
    name="add_rms_norm",
    kind="core",
    reference=add_rms_norm,
    fake=fake,
    numeric=Numeric("U1"),
    sites=("dense_attention", "sparse_attention", "dense_mlp", "moe"),
    traits=(Trait("add_norm_round", ("float32", "bfloat16"), True, "what the sum is rounded to before the norm"),),
    source="vLLM IR fused_add_rms_norm; transformers minimax_m3_vl",
)
