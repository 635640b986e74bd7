"""``route_topk`` through aiter's biased grouped top-k with one group, and a kernel of our own for the weights.

aiter chooses by ``sigmoid(logits) + bias``, the best first, and returns the sigmoids. It takes no NaN, so it runs out
of experts in a row with fewer numbers than ``top_k_experts``; slot ``j`` then names expert ``j``, chosen before or not.
:func:`_finish` gives such slots the lowest experts that are left, as the definition does, then weighs and scales.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from aiter.ops.topk import biased_grouped_topk_hip

from m3hal.ops import load
from m3hal.shape import Site

#: rows of one program
_ROWS = 16


def route_topk(site: Site) -> partial[tuple[torch.Tensor, torch.Tensor]]:
    """The callable for a site."""
    return partial(_route, site.top_k_experts, site.renormalize, site.routed_scale)


def _route(
    k: int,
    renormalize: bool,
    routed_scale: float,
    logits: torch.Tensor,
    bias: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor]
    result = load("route_topk").fake(logits, bias, top_k_experts=k) if out is None else out
    tokens = len(logits)
    if tokens:
        weights, ids = result
        biased_grouped_topk_hip(logits, bias, weights, ids, 1, 1, False, 1.0)
        slots = triton.next_power_of_2(k)
        _finish[(triton.cdiv(tokens, _ROWS),)](weights, ids, tokens, routed_scale, k, slots, renormalize, _ROWS)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    weights,
    ids,
    tokens,
    scale,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, SLOTS)
    at = row[:, None] * K + slot[None, :]
    inside = (row[:, None] < tokens) & (slot[None, :] < K)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    expert = tl.load(ids + at, mask=inside, other=-1)

    earlier = slot[None, :, None] > slot[None, None, :]
    repeated = tl.max(((expert[:, :, None] == expert[:, None, :]) & earlier).to(tl.int32), axis=2) > 0
    filler = inside & (repeated | (weight != weight))
    weight = tl.where(filler, 0.0, weight)
    order = tl.cumsum(filler.to(tl.int32), axis=1)  # 1 for a row's first filler, 2 for its second
    free = tl.zeros((ROWS,), tl.int32)
    chosen = expert
    for candidate in tl.static_range(2 * K - 1):  # the lowest K experts that K - 1 others may leave
        taken = tl.max(((expert == candidate) & ~filler).to(tl.int32), axis=1)
        free += 1 - taken
        chosen = tl.where(filler & (order == free[:, None]) & (taken[:, None] == 0), candidate, chosen)

    if RENORMALIZE:
        total = tl.sum(weight, axis=1)
        weight = tl.div_rn(weight, tl.where(total > 0, total, 1.0)[:, None])
    tl.store(weights + at, weight * scale, mask=inside)
    tl.store(ids + at, chosen, mask=inside)
