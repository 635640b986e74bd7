"""Legitimate evaluations of operators that several ranks compute, and of drafting; see
:mod:`m3hal_conformance.legitimate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal.ops import ExpertWeights
from m3hal.ops._group import Group, ranks
from m3hal.ops.draft_block_sample import MarkovHead
from m3hal.ops.mega_moe import _routed
from m3hal.shape import Site
from m3hal_conformance.legitimate import LOG2_E, Traits, _matmul, _shared, add_rms_norm, combined


def allreduce_add_rms_norm(
    site: Site, traits: Traits, x: Tensor, residual: Tensor, weight: Tensor, group: Group | None = None
) -> tuple[Tensor, Tensor]:
    """Shares are summed from the last rank to the first, unless each step is rounded: then the order is declared."""
    shares = ranks(group).all_gather(x)
    how = traits.get("reduce_dtype", "float32")
    if how == "bfloat16_stepwise" and len(shares) > 1:
        total = shares[0].bfloat16()
        for share in shares[1:]:
            total = total + share.bfloat16()
        return add_rms_norm(site, traits, total.to(x.dtype), residual, weight)
    wide, *others = shares.float().flip(0)
    for share in others:
        wide = wide + share
    total = wide.bfloat16().float() if how == "bfloat16" and len(shares) > 1 else wide
    out, residual_out = add_rms_norm(site, traits, total, residual, weight)
    return out.to(x.dtype), residual_out


def mega_moe(
    site: Site,
    traits: Traits,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    experts: ExpertWeights,
    group: Group | None = None,
) -> Tensor:
    """As the definition sends tokens; a share is rounded on its way back only where that is declared."""

    def share(rows: Tensor, *rest: Any) -> Tensor:
        found = combined(site, traits, rows, *rest).float()
        return found.bfloat16().float() if traits.get("reduce_dtype") == "bfloat16" else found

    bank, local = replace(experts, shared=None), site.num_local_experts
    total = _routed(share, x, weights, ids, bank, ranks(group), local)
    if experts.shared is not None:
        own = {**traits, "activation_format": traits.get("shared_activation_format", "given")}
        total = total + _shared(site, own, x, experts.shared)
    return total.to(x.dtype)


def draft_block_sample(
    site: Site,
    traits: Traits,
    base_logits: Tensor,
    hidden: Tensor | None,
    head: MarkovHead,
    previous: Tensor,
    noise: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Products run over steps of the rank; the confidence head's over steps of the hidden size."""
    rounding = traits.get("logits_round", "float32")
    logits, sure = torch.zeros(base_logits.shape), torch.zeros(base_logits.shape[:2])
    tokens, absent = torch.full(base_logits.shape[:2], -1, dtype=torch.int32), previous < 0
    for step in range(base_logits.shape[1]):
        embedding = head.w1[previous.clamp(min=0).long()]
        bias = _matmul(embedding, head.w2, traits)
        row = base_logits[:, step].float() + (bias if rounding == "float32" else bias.bfloat16().float())
        row = row.bfloat16().float() if rounding == "bfloat16" else row
        if hidden is not None and head.confidence is not None:
            seen = torch.cat([hidden[:, step].float(), embedding.float()], -1)[:, : len(head.confidence)]
            sure[:, step] = 1.0 / (1.0 + torch.exp2(-LOG2_E * _matmul(seen, head.confidence[None], {})[:, 0]))
        logits[:, step] = row
        sought = (row if noise is None else row + noise[:, step]).nan_to_num(nan=-math.inf, posinf=math.inf)
        draft = sought.argmax(-1)
        previous = draft if head.d2t is None else draft + head.d2t[draft]
        tokens[:, step] = previous.int()
    tokens[absent], logits[absent], sure[absent] = -1, 0.0, 0.0
    return tokens, logits, None if hidden is None or head.confidence is None else sure


EVALUATIONS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f for f in (allreduce_add_rms_norm, mega_moe, draft_block_sample)
}
