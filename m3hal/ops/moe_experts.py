"""The routed experts: each token's chosen MLPs, weighted and summed in fp32.

    out[t] = sum_j weights[t, j] * w2[e] . swiglu_oai(w13[e] . x[t])       e = ids[t, j]

Source: transformers ``MiniMaxM3VLExperts``, which sums in the dtype of x (trait ``combine_dtype``).
"""

from __future__ import annotations

from collections.abc import Mapping

from m3hal._lazy import torch
from m3hal.ops._batch import ExpertWeights
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._traits import BATCH_INVARIANT, EXACT, MMA_ACCUM
from m3hal.ops.swiglu_oai import activate


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    *,
    alpha: float,
    beta: float,
    limit: float,
    traits: Mapping[str, str] = EXACT,
) -> torch.Tensor:
    """Weighted sum of the chosen experts of this rank.

    Args:
        x: [T, H].
        weights: fp32 [T, k]; the routed scale is already in them.
        ids: int32 [T, k], experts of this rank, 0 <= id < E; -1 contributes nothing, whatever its weight holds.
        experts: w13 [E, 2*I, H] and w2 [E, H, I].
        alpha, beta, limit: of the activation, as in ``swiglu_oai``.

    Returns:
        [T, H] in x's dtype, rounded once. A token without an expert here gives zeros.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    combine = torch.bfloat16 if traits.get("combine_dtype") == "bfloat16" else compute
    out = torch.zeros(x.shape, dtype=combine, device=x.device)
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        hidden = activate(x[token].to(compute) @ experts.w13[expert].to(compute).T, alpha, beta, limit)
        part = hidden @ experts.w2[expert].to(compute).T * weights[token, slot, None].to(compute)
        out.index_add_(0, token, part.to(combine))
    return out.to(x.dtype)


def fake(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: ExpertWeights, **_: object
) -> torch.Tensor:
    """Empty and contiguous, like ``x``."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


OPERATOR = Operator(
    name="moe_experts",
    kind="core",
    reference=moe_experts,
    fake=fake,
    numeric=Numeric("R"),
    sites=("moe",),
    group="weight",
    traits=(
        Trait("combine_dtype", ("float32", "bfloat16"), True, "what the experts' outputs are rounded to and summed in"),
        MMA_ACCUM,
        BATCH_INVARIANT,
    ),
    source="transformers minimax_m3_vl",
)
