"""Sparse attention of one query token a request over NVFP4 caches: each warp on its own keys of every block.

A step is a block, in equal parts for the warps, whose sums meet when the program ends. A warp loads its operands where
the matrix unit takes them (:mod:`_operands`), a step ahead, and waits for nobody. What limits it is the number of
instructions, so its softmax doesn't run: the first block's largest score is subtracted from all, and only where a later
one outweighs it by more than fp16 holds is everything summed again, from the largest of all.
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
    key_scales,
    key_words,
    over_groups,
    tokens,
    value_scales,
    value_words,
)
from m3hal_triton._softmax import finish, merge_arrived

#: rows of a product: the query heads of a kv head, padded
ROWS = tl.constexpr(16)
#: weights are 2**-6 for the first block's largest score, and from 2**15 on they may be too large for fp16
HEADROOM = tl.constexpr(6.0)
MOST = tl.constexpr(32768.0)

_NUMBERS = ["id_token", "id_head", "id_slot", "table_row", "table_slot", "lse_token", "lse_head"]
_ARRAYS = ["k_scale", "v_scale", "block_ids", "request_of", "position_of", "block_table"]
_ARRAYS += ["partial_lse", "lse", "arrivals"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def attend_by_warps(
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
    # past a program's last block nothing is read, or where there are many the last again, which is cheaper
    SKIP: tl.constexpr = SPLITS > 1
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
    count = tl.sum(keep.to(tl.int32), 0)
    # ids ascend, so of the blocks that are kept only the last can have keys to hide: it is the first here
    rank = tl.cumsum(keep.to(tl.int32), 0)
    rank = tl.where(keep, tl.where(rank == count, 0, rank), -1)
    begin, end = split * count // SPLITS, (split + 1) * count // SPLITS
    table = block_table + request.to(tl.int64) * table_row
    pages = tl.load(table + (ids * BLOCK // PAGE) * table_slot, mask=keep, other=0)
    place = pages * (PAGE // BLOCK) + ids % (PAGE // BLOCK)  # in blocks of memory
    within = tokens(WARPS, KEYS)
    k_codes = cache + (tl.cast(group, tl.int64) * keys.head + keys.codes)
    k_steps = cache + (tl.cast(group, tl.int64) * keys.scale_head + keys.scales)
    v_codes = cache + (tl.cast(group, tl.int64) * values.head + values.codes)
    v_steps = cache + (tl.cast(group, tl.int64) * values.scale_head + values.scales)

    base2 = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((WARPS, ROWS, 8), tl.float32)
    acc = tl.zeros((WARPS, ROWS, DIM), tl.float32)
    if begin < end:
        page, offset = _locate(begin, place, rank, keys.page, BLOCK, PAGE)
        last = tl.max(tl.where(keep, ids, 0), 0)
        seen = tl.where(begin == 0, tl.minimum(newest - last * BLOCK + 1, BLOCK), BLOCK)
        k, k_scales = _load_keys(k_codes, k_steps, page, offset, 1, False, TOKEN, WARPS, KEYS)
        v0, v1, v0_scales, v1_scales = _load_values(
            v_codes, v_steps, page, offset, seen, True, False, TOKEN, WARPS, KEYS
        )
        queries, q_factor = as_queries(numbers, tl.float16, 1)
        queries = tl.broadcast_to(queries[None, :, :], (WARPS, ROWS, DIM))
        score_factor = q_factor * (scale * factor(k_scale, FORMAT))
        # a factor of zero would make NaN of what is hidden
        score_factor = tl.where(score_factor < 1e-30, 1e-30, score_factor)
        # the first block by itself: in the loop nothing is hidden, and its largest score is subtracted from all
        scores = tl.dot(queries, _keys(k, k_scales, WARPS, KEYS, FORMAT, NATIVE))
        scores = tl.where((within < seen)[:, None, :], scores, float("-inf"))
        following = begin + 1 if SKIP else tl.minimum(begin + 1, end - 1)
        page, offset = _locate(following, place, rank, keys.page, BLOCK, PAGE)
        there = (end > begin + 1).to(tl.int32)
        k, k_scales = _load_keys(k_codes, k_steps, page, offset, there, SKIP, TOKEN, WARPS, KEYS)
        base2 = _base2(tl.max(scores, 2), score_factor)
        weights, total = _weigh(scores, score_factor, base2, total, WARPS, KEYS)
        acc = tl.dot(weights, _values(v0, v1, v0_scales, v1_scales, WARPS, KEYS, FORMAT, NATIVE))
        v0, v1, v0_scales, v1_scales = _load_values(
            v_codes, v_steps, page, offset, there, False, SKIP, TOKEN, WARPS, KEYS
        )
        for step in range(begin + 1, end):
            scores = tl.dot(queries, _keys(k, k_scales, WARPS, KEYS, FORMAT, NATIVE))
            following = step + 1 if SKIP else tl.minimum(step + 1, end - 1)
            page, offset = _locate(following, place, rank, keys.page, BLOCK, PAGE)
            there = (end > step + 1).to(tl.int32)
            k, k_scales = _load_keys(k_codes, k_steps, page, offset, there, SKIP, TOKEN, WARPS, KEYS)
            weights, total = _weigh(scores, score_factor, base2, total, WARPS, KEYS)
            acc = tl.dot(weights, _values(v0, v1, v0_scales, v1_scales, WARPS, KEYS, FORMAT, NATIVE), acc)
            v0, v1, v0_scales, v1_scales = _load_values(
                v_codes, v_steps, page, offset, there, False, SKIP, TOKEN, WARPS, KEYS
            )
        # a weight that fp16 may not hold: again, from the largest score of all
        if tl.max(tl.reshape(total, (WARPS * ROWS * 8,)), 0) >= MOST:
            top = tl.full((WARPS, ROWS), float("-inf"), tl.float32)
            for step in range(begin, end):
                page, offset = _locate(step, place, rank, keys.page, BLOCK, PAGE)
                k, k_scales = _load_keys(k_codes, k_steps, page, offset, 1, False, TOKEN, WARPS, KEYS)
                scores = tl.dot(queries, _keys(k, k_scales, WARPS, KEYS, FORMAT, NATIVE))
                here = within < tl.where(step == begin, seen, BLOCK)
                top = tl.maximum(top, tl.max(tl.where(here[:, None, :], scores, float("-inf")), 2))
            base2 = _base2(top, score_factor)
            total = tl.zeros((WARPS, ROWS, 8), tl.float32)
            acc = tl.zeros((WARPS, ROWS, DIM), tl.float32)
            for step in range(begin, end):
                page, offset = _locate(step, place, rank, keys.page, BLOCK, PAGE)
                until = tl.where(step == begin, seen, BLOCK)
                k, k_scales = _load_keys(k_codes, k_steps, page, offset, 1, False, TOKEN, WARPS, KEYS)
                scores = tl.dot(queries, _keys(k, k_scales, WARPS, KEYS, FORMAT, NATIVE))
                scores = tl.where((within < until)[:, None, :], scores, float("-inf"))
                v0, v1, v0_scales, v1_scales = _load_values(
                    v_codes, v_steps, page, offset, until, True, False, TOKEN, WARPS, KEYS
                )
                weights, total = _weigh(scores, score_factor, base2, total, WARPS, KEYS)
                acc = tl.dot(weights, _values(v0, v1, v0_scales, v1_scales, WARPS, KEYS, FORMAT, NATIVE), acc)
    total = tl.sum(tl.sum(total, 2), 0)
    acc = over_groups(acc, WARPS, ROWS)
    finish(
        base2, total, acc, factor(v_scale, FORMAT), token, head, tl.arange(0, DIM), live, split, partial, partial_lse,
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
def _base2(top, score_factor):
    """What is subtracted from a row's scores in units of log2: HEADROOM more than the largest of all warps."""
    largest = tl.max(top, 0)
    return tl.where(largest == float("-inf"), 0.0, largest) * score_factor + HEADROOM


@triton.jit
def _weigh(scores, score_factor, base2, total, WARPS: tl.constexpr, KEYS: tl.constexpr):
    """fp16 weights of scores [WARPS, ROWS, KEYS] before their factor, which is positive; and the sums with them.

    total is of eight keys each: a lane's share of a row is not summed over lanes before the end.
    """
    weights = tl.exp2(scores * score_factor[None, :, None] - base2[None, :, None])
    shares = tl.sum(tl.reshape(weights, (WARPS, scores.shape[1], KEYS // 8, 8)), 2)
    return weights.to(tl.float16), total + shares


@triton.jit
def _load_keys(
    codes, steps, page, offset, there, SKIP: tl.constexpr, TOKEN: tl.constexpr, WARPS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """A block's keys and their scales. codes, steps: where those of the head are in page 0; page: in bytes."""
    words = key_words(codes + (page + offset * TOKEN), there, SKIP, TOKEN, WARPS, KEYS)
    return words, key_scales(steps + (page + offset * 8), there, SKIP, WARPS, KEYS)


@triton.jit
def _load_values(
    codes, steps, page, offset, until, MASKED: tl.constexpr, SKIP: tl.constexpr, TOKEN: tl.constexpr,
    WARPS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A block's values by the halves of their pairs, and the scales of both; see :func:`value_scales`."""
    codes, steps = codes + (page + offset * TOKEN), steps + (page + offset * 8)
    first = value_words(codes, until, 0, SKIP, TOKEN, WARPS, KEYS)
    second = value_words(codes, until, 1, SKIP, TOKEN, WARPS, KEYS)
    first_scales = value_scales(steps, until, 0, MASKED, SKIP, WARPS, KEYS)
    return first, second, first_scales, value_scales(steps, until, 1, MASKED, SKIP, WARPS, KEYS)


@triton.jit
def _keys(words, scales, WARPS: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """fp16 [WARPS, DIM, KEYS]; the branch is explained at hidden() of _decode."""
    tile = tl.zeros((WARPS, DIM, KEYS), tl.float16)
    if tl.num_programs(0) > 0:
        tile = as_keys(words, scales, WARPS, KEYS, FORMAT, NATIVE)
    return tile


@triton.jit
def _values(
    v0, v1, v0_scales, v1_scales, WARPS: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """fp16 [WARPS, KEYS, DIM]; behind a branch, as in :func:`_keys`."""
    tile = tl.zeros((WARPS, KEYS, DIM), tl.float16)
    if tl.num_programs(0) > 0:
        tile = as_values(v0, v1, v0_scales, v1_scales, WARPS, KEYS, FORMAT, NATIVE)
    return tile


@triton.jit
def _locate(step, place, rank, page_stride, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Where the page of a step's block begins, int64, and the block's first key in the page."""
    block = tl.sum(tl.where(rank == step, place, 0), 0)
    return (block // (PAGE // BLOCK)).to(tl.int64) * page_stride, block % (PAGE // BLOCK) * BLOCK
