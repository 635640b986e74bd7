"""A projection without bias: ``out = x . weight^T``, accumulated in fp32.

Source: transformers ``nn.Linear`` in ``minimax_m3_vl``.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._traits import BATCH_INVARIANT, MMA_ACCUM


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Matrix product with the rows of ``weight``.

    Args:
        x: [T, K].
        weight: [N, K].

    Returns:
        [T, N] in x's dtype.
    """
    compute = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return (x.to(compute) @ weight.to(compute).T).to(x.dtype)


def fake(x: torch.Tensor, weight: torch.Tensor, **_: object) -> torch.Tensor:
    """Empty [T, N]."""
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)


OPERATOR = Operator(
    name="linear",
    kind="core",
    reference=linear,
    fake=fake,
    numeric=Numeric("R"),
    sites=("dense_attention", "sparse_attention", "dense_mlp", "moe", "drafter"),
    traits=(MMA_ACCUM, BATCH_INVARIANT),
    source="transformers minimax_m3_vl",
)
