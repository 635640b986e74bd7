"""``select_blocks`` and ``block_scores``: the indexer, from queries and cached keys to block ids or scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton

from m3hal.dispatch.manifest import Kernel
from m3hal.layouts import PagedCache
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton import _pages
from m3hal_triton._decode import check_alignment, compute_dtype, native
from m3hal_triton._launch import DOT_PRECISION, after, common_power_of_two, multiprocessors, programmatic
from m3hal_triton._plan import BatchPlan, plan_batch, plan_bytes
from m3hal_triton._score import score_few, score_few_by_warps, score_many
from m3hal_triton.topk_blocks import launch_topk

#: query tokens of a request up to which all of them are rows of one tile
FEW_TOKENS = 8
#: blocks that a prefill's program takes at least, where the context has them
MIN_SHARE = 4
#: bytes of scores that prefill keeps before it chooses from them
SCORE_BYTES = 128 << 20


@dataclass(frozen=True)
class Decode:
    """Launch parameters of a decode. programs: on each multiprocessor."""

    programs: int = 2
    warps: int = 4
    stages: int = 5
    keys: int = 128  # of a step


@dataclass
class Prefill:
    """Launch parameters of a prefill. waves: of programs that it is split into at least."""

    rows: int = 128
    warps: int = 4
    stages: int = 3
    waves: int = 8


#: found on an H200, by cache format
DECODE = {
    "bfloat16": Decode(),
    "fp8_e4m3": Decode(programs=3),
    "nvfp4": Decode(programs=3),
    "mxfp4": Decode(programs=3),
}
#: in whose stead one warp a program scores
BY_WARPS = {"nvfp4": Decode(6, 1, 7, 64)}
#: IEEE products of fp32 hold their operands in registers
NARROW = Decode(stages=2)
PREFILL = Prefill()


def select_blocks(site: Site) -> Kernel:
    """Scores and choice: two launches, or two for each piece of a long prefill."""
    blocks = _blocks(site)
    row = 4 * site.num_index_heads * blocks
    few = min(site.max_tokens, site.max_seqs * FEW_TOKENS) * row
    return _kernel(site, _Select(site), max(few, min(SCORE_BYTES, site.max_tokens * row)))


def block_scores(site: Site) -> Kernel:
    """Scores alone, over a plan."""
    return _kernel(site, _Scores(site), 0)


def select_blocks_batch_invariant(site: Site) -> Kernel:
    """Scores and choice where a request's ids are the same alone and in any batch: one kernel scores all tokens."""
    row = 4 * site.num_index_heads * _blocks(site)
    return _kernel(site, _Select(site, few_tokens=0), min(SCORE_BYTES, site.max_tokens * row))


def block_scores_batch_invariant(site: Site) -> Kernel:
    """Scores that have the same bits alone and in any batch."""
    return _kernel(site, _Scores(site, few_tokens=0), 0)


def _kernel(site: Site, run: _Indexer, workspace_bytes: int) -> Kernel:
    bounds = {"max_tokens": site.max_tokens, "max_seqs": site.max_seqs, "block_size": site.block_size}
    bounds["programs"] = run.tuning.programs
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

    def __init__(self, site: Site, few_tokens: int = FEW_TOKENS) -> None:
        self._site = site
        self._few_tokens = few_tokens
        self._heads = site.num_index_heads
        self._narrow = site.dtype == "float32"
        self.tuning = NARROW if self._narrow else DECODE[site.index_format]
        self._warp_keys = common_power_of_two(site.block_size, site.page_size)
        if site.index_dim == 128 and not self._narrow:
            self.tuning = BY_WARPS.get(site.index_format, self.tuning)
        self._keys = min(common_power_of_two(site.block_size), 32 if self._narrow else 128)
        self._rows = 16 if self._narrow else PREFILL.rows
        self._requests = triton.next_power_of_2(max(site.max_seqs, 1))

    def _few(
        self, index_q: torch.Tensor, cache: PagedCache, batch: BatchPlan, scores: torch.Tensor, early: bool = False
    ) -> None:
        """Scores of all tokens, equal shares of all requests' blocks for each program."""
        site, meta, heads = self._site, batch.meta, self._heads
        check_alignment(cache)
        tile = triton.next_power_of_2(max(meta.max_q, 1))
        rows = max(16, triton.next_power_of_2(tile * heads))
        given = (
            index_q,
            _pages.memory(cache),
            _pages.keys(cache),
            meta.cu_q,
            meta.seq_lens,
            meta.block_table,
            batch.first_block,
            batch.shares,
            scores,
            scores.shape[2],
            *meta.block_table.stride(),
            *scores.stride(),
            index_q.stride(),
        )
        statics = {
            "HEADS": heads,
            "ROWS": rows,
            "DIM": site.index_dim,
            "BLOCK": site.block_size,
            "PAGE": site.page_size,
            "FORMAT": site.index_format,
            "COMPUTE": compute_dtype(site.index_format, site.dtype),
            "NATIVE": native(index_q.device, site.index_dim, site.dtype),
            "PRECISION": DOT_PRECISION,
            "EARLY": early,
        }
        grid, tuning = (len(batch.shares),), self.tuning
        by_warps = tuning.warps == 1 and rows == 16  # more rows are more than one warp has registers for
        if tuning.warps == 1 and not by_warps:
            tuning = DECODE[site.index_format]
        options = {"num_warps": tuning.warps, "num_stages": tuning.stages, **after(early)}
        if by_warps:
            score_few_by_warps[grid](*given, **statics, KEYS=min(tuning.keys, self._warp_keys), **options)
        else:
            score_few[grid](*given, **statics, KEYS=self._keys, **options)

    def _many(
        self,
        index_q: torch.Tensor,
        cache: PagedCache,
        batch: BatchPlan,
        scores: torch.Tensor,
        low: int,
        high: int,
        fill: bool = False,
    ) -> None:
        """Scores of tokens low .. high-1 into ``scores`` [high - low, Hi, blocks]; fill: -inf where nothing is seen."""
        site, meta = self._site, batch.meta
        check_alignment(cache)
        requests = meta.seq_lens.shape[0]
        tiles = triton.cdiv(index_q.shape[0], self._rows // self._heads)
        # whole waves: a wave of few programs takes as long as a full one
        programs = PREFILL.waves * multiprocessors(index_q.device)
        shares = max(1, min(programs // tiles, scores.shape[2] // MIN_SHARE))
        score_many[(tiles + requests + fill, shares)](
            index_q,
            _pages.memory(cache),
            _pages.keys(cache),
            meta.cu_q,
            meta.seq_lens,
            meta.block_table,
            scores,
            low,
            high,
            scores.shape[2],
            requests,
            index_q.stride(),
            *meta.block_table.stride(),
            *scores.stride(),
            HEADS=self._heads,
            ROWS=self._rows,
            DIM=site.index_dim,
            BLOCK=site.block_size,
            PAGE=site.page_size,
            KEYS=self._keys,
            REQUESTS=self._requests,
            FILL=fill,
            FORMAT=site.index_format,
            COMPUTE=compute_dtype(site.index_format, site.dtype),
            NATIVE=native(index_q.device, site.index_dim, site.dtype),
            PRECISION=DOT_PRECISION,
            num_warps=4 if self._narrow else PREFILL.warps,
            num_stages=2 if self._narrow else PREFILL.stages,
        )


class _Scores(_Indexer):
    """``run(index_q, index_cache, batch, out=None)``."""

    def __call__(
        self, index_q: torch.Tensor, index_cache: PagedCache, batch: BatchPlan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        meta = batch.meta
        if out is None:
            out = load("block_scores").fake(index_q, index_cache, meta, block_size=self._site.block_size)
        few = meta.max_q <= self._few_tokens
        if few or not out.numel() or not meta.seq_lens.shape[0]:
            out.fill_(float("-inf"))
        if out.numel() and meta.seq_lens.shape[0]:
            if few:
                self._few(index_q, index_cache, batch, out)
            else:
                self._many(index_q, index_cache, batch, out, 0, index_q.shape[0], fill=True)
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
        tokens, heads = index_q.shape[0], self._heads
        blocks = max(triton.cdiv(meta.max_k, site.block_size), 1)
        few = meta.max_q <= self._few_tokens
        early = few and programmatic(index_q.device)
        at_once = tokens if few else scratch.numel() // (heads * blocks)
        for low in range(0, tokens, at_once):
            high = min(low + at_once, tokens)
            scores = scratch[: (high - low) * heads * blocks].view(high - low, heads, blocks)
            if few:
                self._few(index_q, index_cache, batch, scores, early)
            else:
                self._many(index_q, index_cache, batch, scores, low, high)
            launch_topk(site, scores, scores.stride(), batch.position[low:], site.block_size, out[low:high], early)
        return out
