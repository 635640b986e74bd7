"""``select_blocks`` and ``block_scores``: the indexer, from queries and cached keys to block ids or scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Tiles
from triton.tools.tensor_descriptor import TensorDescriptor

from m3hal.dispatch.manifest import Kernel
from m3hal.layouts import PagedCache
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton import _pages
from m3hal_triton._decode import check_alignment, compute_dtype, native
from m3hal_triton._launch import (
    DOT_PRECISION,
    Launch,
    Launcher,
    Settings,
    after,
    common_power_of_two,
    is_hopper,
    multiprocessors,
    power_of_two_above,
    programmatic,
)
from m3hal_triton._plan import BatchPlan, Kept, plan_batch, plan_bytes
from m3hal_triton._score import hide_unseen, score_few, score_few_by_warps, score_many
from m3hal_triton._score_tiles import DIM, KEYS, WARPS, score_tiles
from m3hal_triton.topk_blocks import MOST_TOKENS, launch_topk

#: query tokens of a request up to which all of them are rows of one tile
FEW_TOKENS = 8
#: blocks that a prefill's program takes at least and at most, where the context has them
MIN_SHARE, MAX_SHARE = 4, 32
#: programs that share a tile of queries at least, for those of early tiles have less to do
MIN_SHARES = 4
#: rows of scores up to which the kernel that chooses from them is launched while they are made, by groups and by warps
FEW_ROWS, FEW_ROWS_BY_WARPS = 32, 8
#: rows of a tile of queries of :func:`score_tiles`, at most: their products with a block are in registers
MOST_ROWS = 128
#: blocks of a row up to which the kernel after the choice is launched while scores are made, and a choice of many rows
#: too; the choice is slower then
MOST_AHEAD = 2048
#: bytes of scores that prefill keeps before it chooses from them
SCORE_BYTES = 128 << 20


@dataclass(frozen=True)
class Decode:
    """Launch parameters of a decode. programs: on each multiprocessor."""

    programs: int = 2
    warps: int = 4
    stages: int = 5
    keys: int = 128  # of a step
    registers: int | None = None  # of a thread, at most


@dataclass
class Prefill:
    """Launch parameters of a prefill. programs: that a multiprocessor runs side by side."""

    rows: int = 128
    warps: int = 4
    stages: int = 3
    programs: int = 2


#: found on an H200, by cache format
DECODE = {
    "bfloat16": Decode(),
    "fp8_e4m3": Decode(programs=3),
    "nvfp4": Decode(programs=3),
    "mxfp4": Decode(programs=3),
}
#: in whose stead one warp a program scores, where blocks and vectors allow it
BY_WARPS = {"fp8_e4m3": Decode(12, 1, 1, 16, 168), "nvfp4": Decode(12, 1, 1, 32, 168)}
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
        self._warp_keys = common_power_of_two(site.block_size)
        whole = site.page_size % site.block_size == 0 and self._warp_keys >= 8
        if site.index_dim == 128 and site.dtype == "bfloat16" and whole:
            self.tuning = BY_WARPS.get(site.index_format, self.tuning)
        self._keys = min(common_power_of_two(site.block_size), 32 if self._narrow else 128)
        self._rows = 16 if self._narrow else PREFILL.rows
        self._settings: dict[tuple[object, ...], tuple[Launcher, Settings]] = {}
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        self._fake = load("select_blocks").fake
        self._requests = triton.next_power_of_2(max(site.max_seqs, 1))

    def _few(
        self,
        index_q: torch.Tensor,
        cache: PagedCache,
        batch: BatchPlan,
        scores: torch.Tensor,
        blocks: int,
        strides: tuple[int, ...],
        early: bool = False,
    ) -> Launch:
        """Scores of all tokens, equal shares of all requests' blocks for each program.

        scores: fp32, rows of ``blocks`` with these strides.
        """
        meta, table, shares = batch.meta, batch.meta.block_table, batch.shares
        check_alignment(cache)
        tensors = (
            index_q,
            _pages.memory(cache),
            meta.cu_q,
            meta.seq_lens,
            table,
            batch.first_block,
            shares,
            scores,
        )
        numbers = (_pages.keys(cache), blocks, *table.stride(), *strides, index_q.stride())
        first = index_q.shape[0] * self._heads <= (FEW_ROWS_BY_WARPS if self.tuning.warps == 1 else FEW_ROWS)
        ahead = first or blocks <= MOST_AHEAD
        launcher, settings = self._few_settings(cache, meta.max_q, first, early, bool(batch.calls), ahead)
        if launcher is _tiles or (launcher is _few and settings.constants["TILES"]):
            tensors = (*tensors, self._rows_of(cache))
        elif launcher is _few:
            tensors = (*tensors, None)
        return launcher((shares.shape[0], 1, 1), tensors, numbers, settings)

    def _few_settings(
        self, cache: PagedCache, max_q: int, first: bool, early: bool, known: bool, ahead: bool = True
    ) -> tuple[Launcher, Settings]:
        """The kernel and its constants for requests of up to ``max_q`` query tokens."""
        in_place, part = self._in_place(cache), _pages.keys(cache)
        token, in_rows = part.token, part.page % part.token == 0
        key = power_of_two_above(max(max_q, 1)), in_place, token, in_rows, first, early, known, ahead
        if key in self._settings:
            return self._settings[key]
        site, device, tuning = self._site, cache.buf.device, self.tuning
        rows = max(16, power_of_two_above(key[0] * self._heads))
        constants: dict[str, Any] = {
            "HEADS": self._heads,
            "ROWS": rows,
            "BLOCK": site.block_size,
            "PAGE": site.page_size,
        }
        constants |= {"FORMAT": site.index_format, "NATIVE": native(device, site.index_dim, site.dtype), "EARLY": early}
        constants |= {"FIRST": first}
        if tuning.warps == 1 and rows == 16 and in_place:  # more rows are more than one warp has registers for
            constants |= {"KEYS": min(tuning.keys, self._warp_keys), "TOKEN": token}
            made = _by_warps, Settings(constants, num_warps=1, num_stages=1, maxnreg=tuning.registers, **after(early))
        else:
            tuning = DECODE.get(site.index_format, tuning) if tuning.warps == 1 else tuning
            constants |= {"DIM": site.index_dim, "KEYS": self._keys, "PRECISION": DOT_PRECISION}
            tiles = early and in_place and site.index_format == "bfloat16" and in_rows
            constants |= {"KNOWN": known, "TILES": tiles and site.page_size % self._keys == 0}
            constants |= {"COMPUTE": compute_dtype(site.index_format, site.dtype)}
            made = _few, Settings(constants, num_warps=tuning.warps, num_stages=tuning.stages, **after(early))
            if constants["TILES"] and rows <= MOST_ROWS and self._by_tiles(device):
                constants = {"HEADS": self._heads, "ROWS": rows, "PAGE": site.page_size, "KNOWN": known}
                constants["AHEAD"] = ahead
                made = _tiles, Settings(constants, num_warps=WARPS.value, **after(early))
        self._settings[key] = made
        return made

    def _by_tiles(self, device: torch.device) -> bool:
        """Whether :func:`score_tiles` scores a decode from bf16 keys."""
        site = self._site
        return is_hopper(device) and site.block_size == KEYS.value and site.index_dim == DIM.value

    def _rows_of(self, cache: PagedCache) -> TensorDescriptor | Tiles:
        """The cache's keys for the unit that copies tiles."""
        return _pages.tiles(cache) if self._by_tiles(cache.buf.device) else _pages.rows(cache, self._keys)

    def _in_place(self, cache: PagedCache) -> bool:
        """Whether a warp may load its operands itself, 16 bytes at a time."""
        device, part = cache.buf.device, _pages.keys(cache)
        if not (native(device, self._site.index_dim, self._site.dtype) or _by_warps.interpreted):
            return False
        return part.column == 1 and (cache.buf.data_ptr() | part.codes | part.page | part.token) % 16 == 0

    def _many(
        self,
        index_q: torch.Tensor,
        cache: PagedCache,
        batch: BatchPlan,
        scores: torch.Tensor,
        low: int,
        high: int,
        early: bool = False,
    ) -> None:
        """Scores of tokens low .. high-1 into ``scores`` [high - low, Hi, blocks]."""
        site, meta = self._site, batch.meta
        check_alignment(cache)
        requests = meta.seq_lens.shape[0]
        tiles = triton.cdiv(index_q.shape[0], self._rows // self._heads)
        shares = _shares(tiles, scores.shape[2], PREFILL.programs * multiprocessors(index_q.device))
        score_many[(tiles + requests, shares)](
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
            FORMAT=site.index_format,
            COMPUTE=compute_dtype(site.index_format, site.dtype),
            NATIVE=native(index_q.device, site.index_dim, site.dtype),
            PRECISION=DOT_PRECISION,
            EARLY=early,
            **after(early),
            num_warps=4 if self._narrow else PREFILL.warps,
            num_stages=2 if self._narrow else PREFILL.stages,
        )


@lru_cache(maxsize=4096)  # one for every length of every prompt
def _shares(tiles: int, blocks: int, slots: int) -> int:
    """Shares of the blocks, a program for each tile of queries and share, so that the last wave is nearly full.

    A program's own time is about that of one block; a wave of few programs takes as long as a full one.
    """
    most = max(1, blocks // MIN_SHARE)
    least = min(max(MIN_SHARES, blocks // MAX_SHARE), most)
    return min(range(least, most + 1), key=lambda shares: triton.cdiv(tiles * shares, slots) * (blocks / shares + 1))


_few, _by_warps, _tiles = Launcher(score_few), Launcher(score_few_by_warps), Launcher(score_tiles)


class _Scores(_Indexer):
    """``run(index_q, index_cache, batch, out=None)``."""

    def __call__(
        self, index_q: torch.Tensor, index_cache: PagedCache, batch: BatchPlan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        meta = batch.meta
        if out is None:
            out = load("block_scores").fake(index_q, index_cache, meta, block_size=self._site.block_size)
        if not out.numel():
            return out
        tokens, heads, blocks = out.shape
        early = programmatic(out.device)
        hide_unseen[(triton.cdiv(tokens * heads, 32),)](
            out, batch.position, blocks, tokens, *out.stride(),
            HEADS=heads, BLOCK=self._site.block_size, ROWS=32, COLUMNS=32, EARLY=early, num_warps=1,
        )  # fmt: skip
        if meta.seq_lens.shape[0]:
            if meta.max_q <= self._few_tokens:
                self._few(index_q, index_cache, batch, out, out.shape[2], out.stride())
            else:
                self._many(index_q, index_cache, batch, out, 0, index_q.shape[0], early)
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
            out = self._fake(index_q, index_cache, meta, top_k_blocks=site.top_k_blocks)
        kept = batch.calls.get(self)
        if kept is not None and _repeat(kept, index_q, index_cache, out, workspace, self._rows_of):
            return out
        if not out.numel() or not meta.seq_lens.shape[0]:
            return out.fill_(-1)
        known = self._scratch
        if known is None or known[0] is not workspace:
            known = self._scratch = workspace, workspace.view(torch.float32)
        scratch = known[1]
        tokens, heads = index_q.shape[0], self._heads
        blocks = max(-(-meta.max_k // site.block_size), 1)
        strides = (heads * blocks, blocks, 1)
        # rows of padding may be more than there is room for at once
        if meta.max_q <= self._few_tokens and tokens * heads * blocks <= scratch.numel():
            early = programmatic(index_q.device)
            score = self._few(index_q, index_cache, batch, scratch, blocks, strides, early)
            ahead = score.launcher is _tiles and score.settings.constants["KNOWN"] and blocks <= MOST_AHEAD
            choice = launch_topk(site, scratch, blocks, strides, batch.position, site.block_size, out, early, ahead)
            rows = (8,) if len(score.tensors) > 8 and score.tensors[8] is not None else ()
            launches = score.again(0, 1, *rows), choice.again(2)
            again = self in batch.calls  # else the next launch is another: the plan is complete then
            batch.keep(self, workspace, _key(index_q, index_cache, out) if again else None, launches)
            return out
        at_once = min(scratch.numel() // (heads * blocks), MOST_TOKENS)
        for low in range(0, tokens, at_once):
            high = min(low + at_once, tokens)
            scores = scratch[: (high - low) * heads * blocks].view(high - low, heads, blocks)
            self._many(index_q, index_cache, batch, scores, low, high)
            launch_topk(site, scores, blocks, strides, batch.position[low:], site.block_size, out[low:high])
        return out


def _key(index_q: torch.Tensor, index_cache: PagedCache, out: torch.Tensor) -> object:
    """All that a decode's launches over one plan depend on, but addresses."""
    return index_q.shape, index_q.stride(), out.stride(), _pages.keys(index_cache)


def _repeat(
    kept: Kept,
    index_q: torch.Tensor,
    index_cache: PagedCache,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    rows_of: Callable[[PagedCache], object],
) -> bool:
    """Launches as the last decode over this plan did, if only addresses differ."""
    if kept.workspace is not workspace or kept.key != _key(index_q, index_cache, out):
        return False
    score, choice = kept.launches
    address = index_cache.buf.data_ptr()
    if address & 15:
        return False
    rows = (rows_of(index_cache),) if score.changing == 3 else ()
    return score(index_q.data_ptr(), address, *rows) and choice(out.data_ptr())
