"""Chooses each token's experts and their weights.

    score  = sigmoid(logits)
    ids    = the top_k_experts largest of score + bias           the bias decides who, never how much
    weight = score[ids];  weight /= sum(weight);  weight *= routed_scale

A row of ``forced_ids`` replaces the choice, as where a trainer replays what an engine routed; weights stay the same.
Source: transformers ``MiniMaxM3VLTopKRouter``, which scales the experts' output instead: the same, as the scale is 2.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.ops._operator import Numeric, Operator


def route_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    forced_ids: torch.Tensor | None = None,
    *,
    top_k_experts: int,
    renormalize: bool,
    routed_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid routing with a correction bias.

    Args:
        logits: fp32 [T, E].
        bias: fp32 [E], the checkpoint's ``e_score_correction_bias``.
        forced_ids: int32 [T, k] or None. A row with an id takes its entries as they are, in their order, repeated ones
            too; -1 among them stays -1 and weighs 0. A row of -1 chooses as usual.
        top_k_experts: experts per token, at most E.
        renormalize: divide the weights by their sum; a sum of zero gives zeros.
        routed_scale: multiplies the weights; 2.0 in MiniMax-M3.

    Returns:
        weights fp32 [T, k] and ids int32 [T, k]: k distinct experts, the highest ``score + bias`` first, equal ones by
        lower id, NaN last. A NaN logit weighs 0 and does not spread.

    Raises RuntimeError where a forced id is none of the E experts.
    """
    compute = torch.promote_types(logits.dtype, torch.float32)
    score = torch.sigmoid(logits.to(compute))
    # ascending by the negative: a stable sort then puts the lower id first among equals, and NaN at the end
    ids = torch.sort(-(score + bias.to(compute)), dim=-1, stable=True).indices[:, :top_k_experts]
    if forced_ids is not None:
        ids = torch.where((forced_ids >= 0).any(-1, keepdim=True), forced_ids.long(), ids)
    weights = score.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0).nan_to_num(nan=0.0)
    if renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * routed_scale, ids.to(torch.int32, memory_format=torch.contiguous_format)


def fake(
    logits: torch.Tensor,
    bias: torch.Tensor,
    forced_ids: torch.Tensor | None = None,
    *,
    top_k_experts: int,
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty fp32 and int32 [T, k]."""
    shape = (logits.shape[0], top_k_experts)
    weights = torch.empty(shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    return weights, torch.empty(shape, dtype=torch.int32, device=logits.device)


OPERATOR = Operator(
    name="route_topk",
    kind="core",
    reference=route_topk,
    fake=fake,
    numeric=Numeric("S", "ids by regret of score + bias, exact where no two are close; weights within R"),
    sites=("moe",),
    optional=("forced_routing",),
    source="transformers minimax_m3_vl",
)
