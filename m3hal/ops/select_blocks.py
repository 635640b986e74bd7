"""Chooses each query's key blocks: ``block_scores``, then ``topk_blocks``.

Source: transformers ``MiniMaxM3VLIndexer``; MiniMax-AI/MSA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from m3hal._lazy import torch
from m3hal.layouts import PagedCache
from m3hal.ops._batch import SeqMeta
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._traits import BATCH_INVARIANT, EXACT, KV_DEQUANT_ROUND, MMA_ACCUM, Q_DTYPE, TOPK_KEY_BITS
from m3hal.ops.block_scores import block_scores
from m3hal.ops.topk_blocks import topk_blocks


def select_blocks(
    index_q: torch.Tensor,
    index_cache: PagedCache,
    meta: SeqMeta,
    *,
    block_size: int,
    top_k_blocks: int,
    init_blocks: int,
    local_blocks: int,
    traits: Mapping[str, str] = EXACT,
) -> torch.Tensor:
    """Block ids of T query tokens.

    Args:
        index_q: [T, Hi, Di], after norm and RoPE.
        index_cache: index keys, one head of dimension Di.
        meta: which tokens belong to which request, their lengths and pages.
        block_size: positions per block.
        top_k_blocks, init_blocks, local_blocks: as in ``topk_blocks``.

    Returns:
        int32 [T, Hi, top_k_blocks], ascending, -1 in the tail; all -1 in a padded request.
    """
    run = compose(
        block_scores=partial(block_scores, block_size=block_size, traits=traits),
        topk_blocks=partial(topk_blocks, top_k_blocks=top_k_blocks, init_blocks=init_blocks, local_blocks=local_blocks),
        block_size=block_size,
    )
    ids: torch.Tensor = run(index_q, index_cache, meta)
    return ids


def compose(
    *, block_scores: Callable[..., Any], topk_blocks: Callable[..., Any], block_size: int, **_: object
) -> Callable[..., Any]:
    """The operator as a composition of the given core operators."""

    def run(index_q: torch.Tensor, index_cache: PagedCache, meta: SeqMeta) -> Any:
        visible_blocks = (meta.positions(len(index_q)) // block_size + 1).to(torch.int32)  # position -1: none
        return topk_blocks(block_scores(index_q, index_cache, meta), visible_blocks)

    return run


def fake(
    index_q: torch.Tensor, index_cache: PagedCache, meta: SeqMeta, *, top_k_blocks: int, **_: object
) -> torch.Tensor:
    """Empty int32 [T, Hi, k]."""
    return torch.empty((*index_q.shape[:2], top_k_blocks), dtype=torch.int32, device=index_q.device)


OPERATOR = Operator(
    name="select_blocks",
    kind="fused",
    reference=select_blocks,
    fake=fake,
    numeric=Numeric("S", "regret in the reference's scores; prefix, order, count and forced blocks exact"),
    sites=("sparse_attention",),
    group="cache",
    traits=(Q_DTYPE, KV_DEQUANT_ROUND, TOPK_KEY_BITS, MMA_ACCUM, BATCH_INVARIANT),
    covers=("block_scores", "topk_blocks"),
    compose=compose,
    source="transformers minimax_m3_vl; MiniMax-AI/MSA",
)
