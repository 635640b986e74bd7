"""``route_topk``: one row a warp, the best expert taken out k times."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._choose import ABSENT, order_key
from m3hal_triton._launch import after, power_of_two_above, programmatic

#: rows of one program, and its warps: what a row needs of its warp needs no barrier
ROWS = 8
_FAKE = load("route_topk").fake


def route_topk(site: Site) -> partial[tuple[torch.Tensor, torch.Tensor]]:
    """The callable for a site."""
    return partial(_route, site)


def _route(
    site: Site,
    logits: torch.Tensor,
    bias: torch.Tensor,
    forced_ids: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    k = site.top_k_experts
    result: tuple[torch.Tensor, torch.Tensor]
    result = _FAKE(logits, bias, top_k_experts=k) if out is None else out
    tokens, experts = logits.shape
    if tokens:
        early = programmatic(logits.device)
        forced = (None, (0, 0)) if forced_ids is None else (forced_ids, forced_ids.stride())
        _rows[(triton.cdiv(tokens, ROWS),)](
            logits, logits.stride(), bias, bias.stride(0), *forced, *(v for t in result for v in (t, t.stride())),
            tokens, site.routed_scale,
            K=k, SLOTS=power_of_two_above(k), EXPERTS=experts, PADDED=max(32, power_of_two_above(experts)),
            RENORMALIZE=site.renormalize, ROWS=ROWS, EARLY=early, num_warps=ROWS, **after(early),
        )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["weights", "ids"])
def _rows(
    logits, logit_strides, bias, bias_stride, forced, forced_strides, weights, weight_strides, ids, id_strides,
    tokens, scale,
    K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    expert = tl.arange(0, PADDED)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    there, stored = (row < tokens) & (expert < EXPERTS), (row < tokens) & (slot < K)
    logit = tl.load(logits + row * logit_strides[0] + expert * logit_strides[1], mask=there, other=0.0).to(tl.float32)
    score = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    choice = score + tl.load(bias + expert * bias_stride, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    key = order_key(choice, expert < 0, there)
    score = tl.where(score == score, score, 0.0)
    chosen = tl.full((ROWS, SLOTS), -1, tl.int32)
    weight = tl.zeros((ROWS, SLOTS), tl.float32)
    if forced is not None:
        chosen = tl.load(forced + row * forced_strides[0] + slot * forced_strides[1], mask=stored, other=-1)
        replayed = tl.max(chosen, 1)[:, None] >= 0
    for turn in tl.static_range(K):
        best = tl.min(tl.where(key == tl.max(key, 1)[:, None], expert, PADDED - 1), 1)[:, None]
        if forced is not None:
            best = tl.where(replayed, tl.sum(tl.where(slot == turn, chosen, 0), 1)[:, None], best)
        key = tl.where(expert == best, ABSENT, key)
        own = tl.sum(tl.where(expert == best, score, 0.0), 1)[:, None]
        chosen = tl.where(slot == turn, best, chosen)
        weight = tl.where(slot == turn, own, weight)
    if RENORMALIZE:
        total = tl.sum(weight, 1)[:, None]
        weight = tl.div_rn(weight, tl.where(total > 0, total, 1.0))
    tl.store(weights + row * weight_strides[0] + slot * weight_strides[1], weight * scale, mask=stored)
    tl.store(ids + row * id_strides[0] + slot * id_strides[1], chosen, mask=stored)
