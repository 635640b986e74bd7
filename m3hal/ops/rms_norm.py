"""Root-mean-square norm of each row; the Gemma form, whose weights are stored around zero, with ``weight_offset`` 1.

    out[i] = x[i] / sqrt(mean(x**2) + eps) * (weight_offset + weight[i])

Source: transformers ``MiniMaxM3VLRMSNorm``; vLLM IR ``rms_norm``.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.ops._operator import Numeric, Operator


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, weight_offset: float) -> torch.Tensor:
    """Norm over the last axis.

    Args:
        x: [..., n].
        weight: [n], as the checkpoint stores it; nothing was added to it.
        eps: added to the mean square, so that a row of zeros gives zeros.
        weight_offset: 1.0 for Gemma norms, 0.0 for plain ones.

    Returns:
        [..., n] in x's dtype. A NaN makes its own row NaN and no other.
    """
    return normalize(x.to(torch.promote_types(x.dtype, torch.float32)), weight, eps, weight_offset).to(x.dtype)


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> torch.Tensor:
    """The norm in the dtype of ``x``; for the references of other operators."""
    mean_square = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(mean_square + eps) * (weight_offset + weight.to(x.dtype))


def fake(x: torch.Tensor, weight: torch.Tensor, **_: object) -> torch.Tensor:
    """Empty, contiguous, like ``x``."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


OPERATOR = Operator(
    name="rms_norm",
    kind="core",
    reference=rms_norm,
    fake=fake,
    numeric=Numeric("U1"),
    sites=("dense_attention", "sparse_attention", "dense_mlp", "moe", "drafter"),
    source="transformers minimax_m3_vl; vLLM IR rms_norm",
)
