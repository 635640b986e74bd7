"""Sparse attention of one query token a request over FP8 caches: each warp on its own keys of every block.

A step is a block of 128 keys or half of one, in equal parts for the warps, whose running softmaxes meet when the
program ends. A warp loads its operands where the matrix unit takes them (:mod:`_operands`), a step ahead, and waits for
nobody.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._decode import as_queries
from m3hal_triton._operands import (
    DIM,
    as_keys,
    as_values,
    factor,
    key_dims,
    load_keys,
    load_values,
    over_groups,
    tokens,
)
from m3hal_triton._softmax import finish, merge_arrived

#: rows of a product: the query heads of a kv head, padded
ROWS = tl.constexpr(16)

_NUMBERS = ["id_token", "id_head", "id_slot", "table_row", "table_slot", "lse_token", "lse_head"]
_ARRAYS = ["k_scale", "v_scale", "block_ids", "request_of", "position_of", "block_table"]
_ARRAYS += ["partial_lse", "lse", "arrivals"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def attend_fp8_by_warps(
    q,
    cache,
    k_scale,
    v_scale,
    block_ids,
    request_of,
    position_of,
    block_table,
    partial,
    partial_lse,
    out,
    lse,
    arrivals,  # counters, zero but while splits run
    keys,  # _pages.Part
    values,
    scale,  # includes log2(e)
    q_strides,
    id_token,
    id_head,
    id_slot,
    table_row,
    table_slot,
    out_strides,
    lse_token,
    lse_head,
    GROUP: tl.constexpr,  # query heads per kv head
    IDS: tl.constexpr,
    IDS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,  # a multiple of BLOCK
    SPLITS: tl.constexpr,
    MERGE: tl.constexpr,  # by the program that arrives last
    WARPS: tl.constexpr,
    TOKEN: tl.constexpr,  # keys.token and values.token
    LSE: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the kernel ahead has ended
):
    KEYS: tl.constexpr = BLOCK // WARPS
    STEP: tl.constexpr = BLOCK
    split = tl.program_id(0)
    group = tl.program_id(1)
    work = tl.program_id(2)
    row = tl.arange(0, ROWS)
    head = group * GROUP + row % GROUP
    live = row < GROUP
    slot = tl.arange(0, IDS_PADDED)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if SPLITS > 1:
            tl.extra.cuda.gdc_launch_dependents()
    request = tl.load(request_of + work)
    newest = tl.load(position_of + work)  # -1 without a request: nothing is reachable, and the row is zeros
    token = row.to(tl.int64) * 0 + work
    at_ids = block_ids + tl.cast(work, tl.int64) * id_token + group * id_head + slot * id_slot
    ids = tl.load(at_ids, mask=slot < IDS, other=-1)
    at_q = q + token[:, None] * q_strides[0] + head[:, None] * q_strides[1] + key_dims(FORMAT)[None, :] * q_strides[2]
    numbers = tl.load(at_q, mask=live[:, None], other=0.0)
    keep = (ids >= 0) & (ids.to(tl.int64) * BLOCK <= newest)
    rank = tl.where(keep, tl.cumsum(keep.to(tl.int32), 0) - 1, -1)
    steps = tl.sum(keep.to(tl.int32), 0) * (BLOCK // STEP)
    begin, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    table = block_table + request.to(tl.int64) * table_row
    pages = tl.load(table + (ids * BLOCK // PAGE) * table_slot, mask=keep, other=0)
    queries, q_factor = as_queries(numbers, tl.float16, 1)
    queries = tl.broadcast_to(queries[None, :, :], (WARPS, ROWS, DIM))
    score_factor = (q_factor * (scale * factor(k_scale, FORMAT)))[None, :, None]
    within = tokens(WARPS, KEYS)

    top = tl.full((WARPS, ROWS), float("-inf"), tl.float32)
    total = tl.zeros((WARPS, ROWS), tl.float32)
    acc = tl.zeros((WARPS, ROWS, DIM), tl.float32)
    start, page = _locate(begin, ids, pages, rank, BLOCK, STEP)
    offset, there = start % PAGE, (begin < end).to(tl.int32)
    until = tl.where(there > 0, newest + 1 - start, 0)
    k = load_keys(cache, keys, page, group, offset, there, TOKEN, WARPS, KEYS, FORMAT)
    v0 = load_values(cache, values, page, group, offset, until, 0, TOKEN, WARPS, KEYS)
    v1 = load_values(cache, values, page, group, offset, until, 1, TOKEN, WARPS, KEYS)
    for step in range(begin, end):
        scores = tl.dot(queries, _keys(k, WARPS, KEYS, FORMAT, NATIVE))
        scores = tl.where((start + within <= newest)[:, None, :], scores * score_factor, float("-inf"))
        start, page = _locate(step + 1, ids, pages, rank, BLOCK, STEP)
        offset, there = start % PAGE, (end > step + 1).to(tl.int32)
        until = tl.where(there > 0, newest + 1 - start, 0)
        k = load_keys(cache, keys, page, group, offset, there, TOKEN, WARPS, KEYS, FORMAT)
        higher = tl.maximum(top, tl.max(scores, 2))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, :, None])
        total = total * shrink + tl.sum(weights, 2)
        top = higher
        tile = tl.zeros((WARPS, KEYS, DIM), tl.float16)
        if tl.num_programs(0) > 0:
            tile = as_values(v0, v1, 0, 0, WARPS, KEYS, FORMAT, NATIVE)
        acc = acc * shrink[:, :, None] + tl.dot(weights.to(tl.float16), tile)
        v0 = load_values(cache, values, page, group, offset, until, 0, TOKEN, WARPS, KEYS)
        v1 = load_values(cache, values, page, group, offset, until, 1, TOKEN, WARPS, KEYS)
    # of all warps
    best = tl.max(top, 0)
    share = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best)[None, :])
    total = tl.sum(total * share, 0)
    acc = over_groups(acc * share[:, :, None], WARPS, ROWS)
    finish(
        best, total, acc, factor(v_scale, FORMAT), token, head, tl.arange(0, DIM), live, split, partial, partial_lse,
        out, lse, tl.num_programs(1) * GROUP, out_strides, lse_token, lse_head, DIM, SPLITS, LSE,
    )  # fmt: skip
    if MERGE:
        one = tl.cast(work, tl.int64)
        heads = tl.num_programs(1) * GROUP
        merge_arrived(
            arrivals + work * tl.num_programs(1) + group, (one * heads + group * GROUP) * SPLITS, group * GROUP, one,
            partial, partial_lse, out, lse, out_strides, lse_token, lse_head, GROUP, DIM, SPLITS, LSE,
        )  # fmt: skip


@triton.jit
def _keys(words, WARPS: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """fp16 [WARPS, DIM, KEYS]; the branch is explained at hidden() of _decode."""
    tile = tl.zeros((WARPS, DIM, KEYS), tl.float16)
    if tl.num_programs(0) > 0:
        tile = as_keys(words, 0, WARPS, KEYS, FORMAT, NATIVE)
    return tile


@triton.jit
def _locate(step, ids, pages, rank, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """The first key and the page of a step; of block 0 and page 0 where there is no such step."""
    here = rank == step // (BLOCK // STEP)
    start = tl.sum(tl.where(here, ids, 0), 0) * BLOCK + step % (BLOCK // STEP) * STEP
    return start, tl.sum(tl.where(here, pages, 0), 0).to(tl.int64)
