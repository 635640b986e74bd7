"""``topk_blocks`` and ``merge_topk``: the choice of key blocks from scores."""

from __future__ import annotations

from functools import cache, partial

import torch
import triton
import triton.language as tl

from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._choose import ABSENT, NO_LIMIT, order_key, place
from m3hal_triton._launch import Launch, Launcher, Settings, after, converts, power_of_two_above

#: scores that a warp ranks; a program is one row, and one warp needs no barrier
SCORES_PER_WARP = 512
#: that a program ranks at least, so that few widths make a kernel of their own
MIN_SCORES = 64
#: tokens of a launch, at most: what a grid's second axis takes
MOST_TOKENS = 65535


def topk_blocks(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_topk, site)


def merge_topk(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_merge, site)


def _topk(
    site: Site, scores: torch.Tensor, visible_blocks: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = load("topk_blocks").fake(scores, visible_blocks, top_k_blocks=site.top_k_blocks) if out is None else out
    for low in range(0, len(out), MOST_TOKENS):
        some = slice(low, low + MOST_TOKENS)
        launch_topk(site, scores[some], scores.shape[-1], scores.stride(), visible_blocks[some], 1, out[some])
    return out


def launch_topk(
    site: Site,
    scores: torch.Tensor,
    width: int,
    strides: tuple[int, ...],
    visible: torch.Tensor,
    divisor: int,
    out: torch.Tensor,
    early: bool = False,
    ahead: bool = False,
) -> Launch | None:
    """Chooses for every row of out [T, Hi, k] among ``width`` scores, by the launch that is returned.

    A token sees ``visible[t]`` blocks, or with a divisor, the block size, ``visible[t] // divisor + 1`` of a position.
    """
    tokens, heads, _ = out.shape
    if not out.numel():
        return None
    rule = (site.top_k_blocks, site.init_blocks, site.local_blocks)  # quicker to look up than a site
    settings = _settings(rule, width, divisor, converts(out.device), early, ahead)
    numbers = (visible.stride(0), width, strides, out.stride())
    return _launch((heads, tokens, 1), (scores, visible, out), numbers, settings)


@cache
def _settings(rule: tuple[int, int, int], width: int, divisor: int, native: bool, early: bool, ahead: bool) -> Settings:
    top_k, init, local = rule
    blocks = power_of_two_above(max(width, MIN_SCORES))
    warps = max(1, min(8, blocks // SCORES_PER_WARP))
    constants = {
        "DIVISOR": divisor,
        "TOPK": top_k,
        "TOPK_PADDED": power_of_two_above(top_k),
        "INIT": init,
        "LOCAL": local,
        "BLOCKS": blocks,
        "WHOLE": blocks == width,
        "LANES": 32 * warps,
        "NATIVE": native,
        "EARLY": early,
        "AHEAD": ahead,
    }
    return Settings(constants, num_warps=warps, **after(early))


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["visible_of", "out"])
def _choose_row(
    scores,
    visible_of,
    out,
    visible_stride,
    blocks,
    score_strides,
    out_strides,
    DIVISOR: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,  # BLOCKS is blocks
    LANES: tl.constexpr,
    NATIVE: tl.constexpr,  # an NVIDIA GPU
    EARLY: tl.constexpr,  # launched before the scores are complete, which what else it reads is
    AHEAD: tl.constexpr,  # lets the next kernel be launched while scores are made, not when they are complete
):
    EACH: tl.constexpr = 4 if BLOCKS >= 4 * LANES else BLOCKS // LANES
    CHUNKS: tl.constexpr = BLOCKS // (LANES * EACH)
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    visible = tl.load(visible_of + token * visible_stride)
    if DIVISOR > 1:
        visible = tl.where(visible < 0, 0, visible // DIVISOR + 1)
    visible = tl.minimum(visible, blocks)
    lane = tl.arange(0, LANES)[None, :, None]
    block = (lane * CHUNKS + tl.arange(0, CHUNKS)[:, None, None]) * EACH + tl.arange(0, EACH)[None, None, :]
    present = block < visible
    at = scores + token * score_strides[0] + head * score_strides[1] + block.to(tl.int64) * score_strides[2]
    at = tl.max_contiguous(at, [1, 2, 4])  # lanes along the second axis: Triton orders axes by this
    if EARLY:
        if AHEAD:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not AHEAD:
            tl.extra.cuda.gdc_launch_dependents()
    score = tl.load(at) if WHOLE else tl.load(at, mask=present, other=0.0)
    forced = present & ((block < INIT) | (block >= visible - LOCAL))
    wanted = tl.minimum(visible, TOPK)
    position = place(order_key(score, forced, present), visible, wanted, tl.minimum(visible, INIT + LOCAL))
    row = out + token * out_strides[0] + head * out_strides[1]
    at = row + position * out_strides[2]
    if NATIVE:  # a masked store of Triton's exchanges everything through shared memory first
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ge.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }", "=r,l,r,r",
            [at, block, position], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, block, mask=position >= 0)
    slot = tl.arange(0, TOPK_PADDED)
    none = tl.full((TOPK_PADDED,), -1, tl.int32)
    tl.store(row + slot * out_strides[2], none, mask=(slot >= visible) & (slot < TOPK))


_launch = Launcher(_choose_row)


def _merge(
    site: Site,
    scores: torch.Tensor,
    ids: torch.Tensor,
    visible_blocks: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = load("merge_topk").fake(scores, ids, visible_blocks, top_k_blocks=site.top_k_blocks) if out is None else out
    if out.numel():
        shards, tokens, heads, k = ids.shape
        candidates = power_of_two_above(shards * k + site.init_blocks + site.local_blocks)
        _merge_rows[(tokens, heads)](
            scores,
            ids,
            visible_blocks,
            visible_blocks.stride(0),
            out,
            scores.stride(),
            ids.stride(),
            out.stride(),
            OFFERS=shards * k,
            K=k,
            CANDIDATES=candidates,
            TOPK=site.top_k_blocks,
            INIT=site.init_blocks,
            LOCAL=site.local_blocks,
            num_warps=max(1, min(8, candidates // SCORES_PER_WARP)),
        )
    return out


@triton.jit
def _merge_rows(
    scores,
    ids,
    visible_of,
    visible_stride,
    out,
    score_strides,
    id_strides,
    out_strides,
    OFFERS: tl.constexpr,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """One row: of the shards' offers and the forced blocks the best, one after the other; then their ids, ascending.

    Shards order their offers as they like, so a candidate's place says nothing about its id.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    visible = tl.load(visible_of + token * visible_stride)
    c = tl.arange(0, CANDIDATES)
    offered = c < OFFERS
    at = (c // K).to(tl.int64)
    id_at = ids + at * id_strides[0] + token * id_strides[1] + head * id_strides[2] + (c % K) * id_strides[3]
    ident = tl.load(id_at, mask=offered, other=-1)
    where = at * score_strides[0] + token * score_strides[1] + head * score_strides[2] + (c % K) * score_strides[3]
    score = tl.load(scores + where, mask=offered, other=0.0)
    # forced blocks count once, offered or not: as candidates of their own, so the offers of them are dropped
    first, last = c - OFFERS, visible - 1 - (c - OFFERS - INIT)
    by_force = tl.where(c < OFFERS + INIT, tl.where(first < visible, first, -1), tl.where(last >= INIT, last, -1))
    extra = (c >= OFFERS) & (c < OFFERS + INIT + LOCAL)
    ordinary = offered & (ident >= INIT) & (ident < visible - LOCAL)
    present = extra & (by_force >= 0) | ordinary & (ident >= 0)
    key = order_key(score, extra, present)
    ident = tl.where(present, tl.where(extra, by_force, ident), NO_LIMIT)

    chosen = tl.full((CANDIDATES,), NO_LIMIT, tl.int32)
    for _ in range(TOPK):
        best = tl.min(tl.where(key == tl.max(key, 0), ident, NO_LIMIT), 0)  # of equal ones the first
        chosen = tl.where(ident == best, ident, chosen)
        key = tl.where(ident == best, ABSENT, key)
    row = out + token * out_strides[0] + head * out_strides[1]
    for slot in range(TOPK):
        lowest = tl.min(chosen, 0)
        tl.store(row + slot * out_strides[2], tl.where(lowest == NO_LIMIT, -1, lowest))
        chosen = tl.where(chosen == lowest, NO_LIMIT, chosen)
