"""A projection without bias: ``out = x . weight^T``, accumulated in fp32.

A weight may be stored in any format; it enters with the numbers that it stands for. What x is rounded to, if anything,
is the trait ``activation_format``.
Source: transformers ``nn.Linear`` in ``minimax_m3_vl``.
"""

from __future__ import annotations

from collections.abc import Mapping

from m3hal._lazy import torch
from m3hal.formats import QTensor
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._stored import ACTIVATION_FORMAT, numbers, rounded
from m3hal.ops._traits import BATCH_INVARIANT, EXACT, MMA_ACCUM, MX_SCALE_RULE, NVFP4_QUANTIZER


def linear(x: torch.Tensor, weight: torch.Tensor | QTensor, *, traits: Mapping[str, str] = EXACT) -> torch.Tensor:
    """Matrix product with the rows of ``weight``.

    Args:
        x: [T, K].
        weight: [N, K], in any storage format.

    Returns:
        [T, N] in x's dtype, or in the weight's where that is the wider: a router's weight is fp32, and its logits are.
    """
    given = _given(x, weight)
    compute = torch.promote_types(given, torch.float32)
    return (rounded(x.to(compute), None, traits) @ numbers(weight, compute).T).to(given)


def _given(x: torch.Tensor, weight: torch.Tensor | QTensor) -> torch.dtype:
    """Of the output. What a stored weight was made of is not known."""
    return x.dtype if isinstance(weight, QTensor) else torch.promote_types(x.dtype, weight.dtype)


def fake(x: torch.Tensor, weight: torch.Tensor | QTensor, **_: object) -> torch.Tensor:
    """Empty [T, N]."""
    rows = weight.data.shape[0] if isinstance(weight, QTensor) else weight.shape[0]
    return torch.empty((x.shape[0], rows), dtype=_given(x, weight), device=x.device)


OPERATOR = Operator(
    name="linear",
    kind="core",
    reference=linear,
    fake=fake,
    numeric=Numeric("R"),
    sites=("dense_attention", "sparse_attention", "dense_mlp", "moe", "drafter"),
    traits=(ACTIVATION_FORMAT, NVFP4_QUANTIZER, MX_SCALE_RULE, MMA_ACCUM, BATCH_INVARIANT),
    optional=("projection_format",),
    source="transformers minimax_m3_vl",
)
