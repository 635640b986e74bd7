"""``select_blocks`` and ``block_scores``: the indexer, from queries and cached keys to block ids or scores."""

from __future__ import annotations

from functools import partial

import torch
import triton

from m3hal.dispatch.manifest import Kernel
from m3hal.layouts import PagedCache
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._launch import common_power_of_two, dot_precision, multiprocessors
from m3hal_triton._plan import BatchPlan, plan_batch, plan_bytes
from m3hal_triton._score import score_few, score_many
from m3hal_triton.topk_blocks import launch_topk

#: query tokens of a request up to which all of them are rows of one tile
FEW_TOKENS = 8
#: bytes of scores that prefill keeps before it chooses from them
SCORE_BYTES = 128 << 20
#: elements that the choice from a long context holds in registers
CHOICE_TILE = 16384


def select_blocks(site: Site) -> Kernel:
    """Scores and choice: one launch for decode, two for prefill."""
    blocks = _blocks(site)
    rows = site.num_index_heads * FEW_TOKENS
    few = 4 * site.max_seqs * blocks * rows
    return _kernel(site, _Select(site), max(few, min(SCORE_BYTES, 4 * site.max_tokens * site.num_index_heads * blocks)))


def block_scores(site: Site) -> Kernel:
    """Scores alone, over a plan."""
    return _kernel(site, _Scores(site), 0)


def _kernel(site: Site, run: _Indexer, workspace_bytes: int) -> Kernel:
    bounds = {"max_tokens": site.max_tokens, "max_seqs": site.max_seqs, "block_size": site.block_size}
    return Kernel(
        run=run,
        workspace_bytes=workspace_bytes,
        plan_batch=partial(plan_batch, **bounds),
        plan_bytes=plan_bytes(site.max_tokens, site.max_seqs),
    )


def _blocks(site: Site) -> int:
    return triton.cdiv(site.max_context, site.block_size)


class _Indexer:
    """What both operators launch."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._heads = site.num_index_heads
        narrow = site.dtype == "float32"  # IEEE products of fp32 hold their operands in registers
        self._keys = min(common_power_of_two(site.block_size, 1 << 30), 32 if narrow else 128)
        self._rows = 32 if narrow else 128
        self._stages = 2 if narrow else 3

    def _few(
        self, index_q: torch.Tensor, cache: PagedCache, batch: BatchPlan, scores: torch.Tensor, out: torch.Tensor | None
    ) -> None:
        """One launch over all requests' blocks; with ``out``, scores is scratch and the blocks are chosen too."""
        site, meta, heads = self._site, batch.meta, self._heads
        keys = cache.k
        tile = triton.next_power_of_2(max(meta.max_q, 1))
        blocks = triton.next_power_of_2(max(triton.cdiv(meta.max_k, site.block_size), 1))
        padded = triton.next_power_of_2(heads)
        score_few[(2 * multiprocessors(index_q.device),)](
            index_q,
            keys,
            meta.cu_q,
            meta.seq_lens,
            meta.block_table,
            batch.first_block,
            batch.position,
            batch.counters,
            scores,
            scores if out is None else out,
            index_q.shape[0],
            meta.seq_lens.shape[0],
            *index_q.stride(),
            keys.stride(0),
            keys.stride(2),
            keys.stride(3),
            *meta.block_table.stride(),
            *(scores.stride() if out is None else (0, 0, 0)),
            *((0, 0, 0) if out is None else out.stride()),
            HEADS=heads,
            HEADS_PADDED=padded,
            HEADS_AT_ONCE=max(1, min(padded, CHOICE_TILE // blocks)),
            QT=tile,
            ROWS=max(16, triton.next_power_of_2(tile * heads)),
            DIM=site.index_dim,
            BLOCK=site.block_size,
            PAGE=site.page_size,
            KEYS=self._keys,
            REQUESTS=triton.next_power_of_2(meta.seq_lens.shape[0]),
            CHOOSE=out is not None,
            TOPK=site.top_k_blocks,
            TOPK_PADDED=triton.next_power_of_2(site.top_k_blocks),
            INIT=site.init_blocks,
            LOCAL=site.local_blocks,
            BLOCKS=blocks,
            PRECISION=dot_precision(index_q.dtype),
            num_warps=8,
            num_stages=self._stages,
        )

    def _many(
        self, index_q: torch.Tensor, cache: PagedCache, batch: BatchPlan, scores: torch.Tensor, low: int, high: int
    ) -> None:
        """Scores of tokens low .. high-1 into ``scores`` [high - low, Hi, blocks]."""
        site, meta = self._site, batch.meta
        keys = cache.k
        requests = meta.seq_lens.shape[0]
        tiles = triton.cdiv(index_q.shape[0], self._rows // self._heads) + requests
        programs = 4 * multiprocessors(index_q.device)
        shares = max(1, min(triton.cdiv(programs, tiles), scores.shape[2], 64))
        score_many[(tiles, shares)](
            index_q,
            keys,
            meta.cu_q,
            meta.seq_lens,
            meta.block_table,
            scores,
            low,
            high,
            requests,
            *index_q.stride(),
            keys.stride(0),
            keys.stride(2),
            keys.stride(3),
            *meta.block_table.stride(),
            *scores.stride(),
            HEADS=self._heads,
            ROWS=self._rows,
            DIM=site.index_dim,
            BLOCK=site.block_size,
            PAGE=site.page_size,
            KEYS=self._keys,
            REQUESTS=triton.next_power_of_2(requests),
            PRECISION=dot_precision(index_q.dtype),
            num_warps=8 if self._rows == 128 else 4,
            num_stages=self._stages,
        )


class _Scores(_Indexer):
    """``run(index_q, index_cache, batch, out=None)``."""

    def __call__(
        self, index_q: torch.Tensor, index_cache: PagedCache, batch: BatchPlan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        meta = batch.meta
        if out is None:
            out = load("block_scores").fake(index_q, index_cache, meta, block_size=self._site.block_size)
        out.fill_(float("-inf"))
        if out.numel() and meta.seq_lens.shape[0]:
            if meta.max_q <= FEW_TOKENS:
                self._few(index_q, index_cache, batch, out, None)
            else:
                self._many(index_q, index_cache, batch, out, 0, index_q.shape[0])
        return out


class _Select(_Indexer):
    """``run(index_q, index_cache, batch, out=None, workspace=None)``."""

    def __call__(
        self,
        index_q: torch.Tensor,
        index_cache: PagedCache,
        batch: BatchPlan,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        site, meta = self._site, batch.meta
        if out is None:
            out = load("select_blocks").fake(index_q, index_cache, meta, top_k_blocks=site.top_k_blocks)
        if not out.numel() or not meta.seq_lens.shape[0]:
            return out.fill_(-1)
        scratch = workspace.view(torch.float32)
        if meta.max_q <= FEW_TOKENS:
            self._few(index_q, index_cache, batch, scratch, out)
            return out
        tokens, heads = index_q.shape[0], self._heads
        blocks = max(triton.cdiv(meta.max_k, site.block_size), 1)
        at_once = scratch.numel() // (heads * blocks)
        for low in range(0, tokens, at_once):
            high = min(low + at_once, tokens)
            scores = scratch[: (high - low) * heads * blocks].view(high - low, heads, blocks)
            self._many(index_q, index_cache, batch, scores, low, high)
            launch_topk(site, scores, scores.stride(), batch.position[low:], site.block_size, out[low:high])
        return out
