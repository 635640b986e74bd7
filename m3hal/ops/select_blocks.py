"""Chooses each query's key blocks: ``block_scores``, then ``topk_blocks``.

With a group of R ranks that all hold the index keys, rank r scores the blocks ``r, r + R, r + 2 R, ...`` for all heads,
keeps its best ``top_k_blocks`` of them, and ``merge_topk`` makes of all ranks' offers what one rank alone would have
chosen. What is saved is the reading of index keys: each rank reads one part in R.

Source: transformers ``MiniMaxM3VLIndexer``; MiniMax-AI/MSA; vLLM's context-parallel indexer (strided ownership).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from m3hal._lazy import torch
from m3hal.layouts import PagedCache
from m3hal.ops._batch import SeqMeta
from m3hal.ops._group import Group
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._traits import BATCH_INVARIANT, EXACT, KV_DEQUANT_ROUND, MMA_ACCUM, Q_DTYPE, TOPK_KEY_BITS
from m3hal.ops.block_scores import block_scores
from m3hal.ops.merge_topk import merge_topk
from m3hal.ops.topk_blocks import topk_blocks


def select_blocks(
    index_q: torch.Tensor,
    index_cache: PagedCache,
    meta: SeqMeta,
    group: Group | None = None,
    *,
    block_size: int,
    top_k_blocks: int,
    init_blocks: int,
    local_blocks: int,
    traits: Mapping[str, str] = EXACT,
) -> torch.Tensor:
    """Block ids of T query tokens.

    Args:
        index_q: [T, Hi, Di], after norm and RoPE; with a group all index heads, on every rank the same.
        index_cache: index keys, one head of dimension Di; with a group on every rank the same.
        meta: which tokens belong to which request, their lengths and pages.
        group: ranks that share the scoring, as many as the site's ``context_parallel``; None: this one alone.
        block_size: positions per block.
        top_k_blocks, init_blocks, local_blocks: as in ``topk_blocks``.

    Returns:
        int32 [T, Hi, top_k_blocks], ascending, -1 in the tail; all -1 in a padded request. On every rank the same.

    Raises:
        ValueError: with a group, when a page holds several blocks: no block table can name one of them.
    """
    choice: Mapping[str, Any] = {"top_k_blocks": top_k_blocks, "init_blocks": init_blocks, "local_blocks": local_blocks}
    run = compose(
        block_scores=partial(block_scores, block_size=block_size, traits=traits),
        topk_blocks=partial(topk_blocks, **choice),
        merge_topk=partial(merge_topk, **choice),
        block_size=block_size,
    )
    ids: torch.Tensor = run(index_q, index_cache, meta, group)
    return ids


def compose(
    *,
    block_scores: Callable[..., Any],
    topk_blocks: Callable[..., Any],
    merge_topk: Callable[..., Any],
    block_size: int,
    **_: object,
) -> Callable[..., Any]:
    """The operator as a composition of the given core operators."""

    def run(index_q: torch.Tensor, index_cache: PagedCache, meta: SeqMeta, group: Group | None = None) -> Any:
        position = meta.positions(len(index_q))
        visible_blocks = (position // block_size + 1).to(torch.int32)  # position -1: none
        if group is None or group.size == 1:
            return topk_blocks(block_scores(index_q, index_cache, meta), visible_blocks)
        own, mine = shard(meta, position, group, index_cache.layout.page_size, block_size)
        scores = block_scores(index_q, index_cache, own)
        best = topk_blocks(scores, mine)  # forced ones beside the others' best: nothing that could win stays behind
        offered = scores.gather(-1, best.clamp(min=0).long())
        ids = torch.where(best < 0, -1, best * group.size + group.rank)
        return merge_topk(group.all_gather(offered), group.all_gather(ids), visible_blocks)

    return run


def shard(
    meta: SeqMeta, position: torch.Tensor, group: Group, page_size: int, block_size: int
) -> tuple[SeqMeta, torch.Tensor]:
    """The blocks that a rank owns, as contexts of their own, and int32 [T]: how many of them each token sees.

    Each token is a request of one query: what it sees of the owned blocks, one after the other, ends where the owned
    part of its context does, and that does not grow by one from token to token.
    """
    if block_size % page_size:
        raise ValueError(
            f"a page of {page_size} tokens holds several blocks of {block_size}, and ranks own blocks; "
            "allocate pages of a block or less"
        )
    visible = position // block_size + 1
    mine = (visible - group.rank + group.size - 1).clamp(min=0) // group.size
    owns_newest = (visible > 0) & ((visible - 1) % group.size == group.rank)
    seen = mine * block_size - torch.where(owns_newest, block_size - 1 - position % block_size, 0)

    pages = block_size // page_size
    table = torch.nn.functional.pad(meta.block_table, (0, -meta.block_table.shape[1] % pages))
    blocks = table.unflatten(1, (-1, pages))[:, group.rank :: group.size].flatten(1)  # type: ignore[no-untyped-call]
    if blocks.shape[1] == 0:  # no request is so long that the rank owns a block of it
        blocks = table.new_zeros(len(table), pages)
    token = torch.arange(len(position), device=position.device)
    request = torch.searchsorted(meta.cu_q[1:].long(), token, right=True).clamp(max=max(len(table) - 1, 0))
    own = SeqMeta(
        cu_q=torch.arange(len(position) + 1, dtype=torch.int32, device=position.device),
        seq_lens=seen.to(torch.int32),
        block_table=blocks[request] if len(table) else blocks.new_zeros(len(position), pages),
        max_q=1,
        max_k=-(-meta.max_k // (block_size * group.size)) * block_size,
    )
    return own, mine.to(torch.int32)


def fake(
    index_q: torch.Tensor,
    index_cache: PagedCache,
    meta: SeqMeta,
    group: Group | None = None,
    *,
    top_k_blocks: int,
    **_: object,
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
    optional=("context_parallel",),
    traits=(Q_DTYPE, KV_DEQUANT_ROUND, TOPK_KEY_BITS, MMA_ACCUM, BATCH_INVARIANT),
    covers=("block_scores", "topk_blocks", "merge_topk"),
    compose=compose,
    source="transformers minimax_m3_vl; MiniMax-AI/MSA; vLLM context-parallel indexer",
)
