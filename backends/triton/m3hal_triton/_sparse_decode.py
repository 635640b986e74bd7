"""Sparse attention when a request brings few query tokens: decode and multi-token verify.

One program takes up to QT tokens of a request and one kv head, and walks the *union* of the blocks that those tokens
selected, so that a block is read once. Small batches split the union over several programs, and a second kernel merges
their partial results in the order of the splits. (A merge by the program that finishes last was slower, twice: by 2 to
5 us.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._decode import (
    as_queries,
    dims,
    factor,
    key_dims,
    load_keys,
    load_rows,
    load_scales,
    natural,
    packed,
)
from m3hal_triton._softmax import accumulate, clear_loose, finish

#: arguments whose values and addresses make no other kernel
_NUMBERS = ["tokens", "requests", "chunks", "id_token", "id_head", "id_slot", "table_row", "table_slot"]
_NUMBERS += ["lse_token", "lse_head"]
_ARRAYS = ["k_scale", "v_scale", "block_ids", "cu_q", "seq_lens", "request_of", "position_of", "block_table"]
_ARRAYS += ["partial_lse", "lse"]


@triton.jit
def _locate(
    step, newest, ids, pages, rank, table, table_step, BLOCK: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """The block, the first key and the page of a step; some page where there is no such step or none of its keys."""
    here = rank == step // (BLOCK // KEYS)
    block = tl.sum(tl.where(here, ids, 0), 0)
    start = block * BLOCK + step % (BLOCK // KEYS) * KEYS
    if PAGE >= BLOCK:
        page = tl.sum(tl.where(here, pages, 0), 0)
    else:
        page = tl.load(table + start // PAGE * table_step, mask=start <= newest, other=0)
    return block, start, page.to(tl.int64)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def attend(
    q,
    cache,
    k_scale,
    v_scale,
    block_ids,
    cu_q,
    seq_lens,
    request_of,
    position_of,
    block_table,
    partial,
    partial_lse,
    out,
    lse,
    keys,  # _pages.Part
    values,
    scale,  # includes log2(e)
    tokens,
    requests,
    chunks,  # programs along the tokens of one request
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
    ROWS: tl.constexpr,  # QT * GROUP, padded for the matrix unit
    QT: tl.constexpr,
    DIM: tl.constexpr,
    IDS: tl.constexpr,
    IDS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,  # per step; divides BLOCK and PAGE
    SPLITS: tl.constexpr,
    LSE: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the kernel ahead has ended
):
    SMALL: tl.constexpr = ROWS < 64
    PACKED: tl.constexpr = FORMAT == "nvfp4"
    split = tl.program_id(0)
    group = tl.program_id(1)
    work = tl.program_id(2)
    row = tl.arange(0, ROWS)
    head = group * GROUP + row % GROUP
    dim, q_dim = dims(DIM, FORMAT), key_dims(DIM, FORMAT, SMALL)
    within = tl.arange(0, KEYS)
    entry = tl.arange(0, QT * IDS_PADDED)
    slot = entry % IDS_PADDED
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if SPLITS > 1:
            tl.extra.cuda.gdc_launch_dependents()

    # whose tokens, and the union of their blocks in the order of first occurrence
    if QT == 1:
        request = tl.load(request_of + work)
        newest = tl.load(position_of + work)  # -1 without a request: nothing is reachable, and the row is zeros
        token = row.to(tl.int64) * 0 + work
        live = row < GROUP
        position = row * 0 + newest
        at_ids = block_ids + tl.cast(work, tl.int64) * id_token + group * id_head + slot * id_slot
        ids = tl.load(at_ids, mask=slot < IDS, other=-1)
        keep = (ids >= 0) & (ids.to(tl.int64) * BLOCK <= newest)
    else:
        request = work // chunks
        first = tl.load(cu_q + request) + work % chunks * QT
        last = tl.load(cu_q + request + 1)
        seq_len = tl.load(seq_lens + request)
        if split == 0 and SPLITS == 1:
            loose = tl.load(cu_q + requests) + work
            clear_loose(
                loose, tokens, tl.num_programs(2), head, dim, row < GROUP, out, lse, out_strides, lse_token, lse_head,
                ROWS, DIM, LSE,
            )  # fmt: skip
        if first >= last:
            return
        newest = seq_len - 1
        token = (first + row // GROUP).to(tl.int64)
        live = (token < last) & (row < QT * GROUP)
        position = seq_len - (last - token).to(tl.int32)
        id_of = (first + entry // IDS_PADDED).to(tl.int64)
        at_ids = block_ids + id_of * id_token + group * id_head + slot * id_slot
        ids = tl.load(at_ids, mask=(id_of < last) & (slot < IDS), other=-1)
        reachable = (ids >= 0) & (ids.to(tl.int64) * BLOCK <= seq_len - (last - id_of))
        earlier = (ids[:, None] == ids[None, :]) & reachable[None, :] & (entry[None, :] < entry[:, None])
        keep = reachable & (tl.max(earlier.to(tl.int32), 1) == 0)
        column = tl.arange(0, IDS_PADDED)  # which rows selected a block
        at_ids = block_ids + token[:, None] * id_token + group * id_head + column[None, :] * id_slot
        row_ids = tl.load(at_ids, mask=live[:, None] & (column < IDS)[None, :], other=-1)
    rank = tl.where(keep, tl.cumsum(keep.to(tl.int32), 0) - 1, -1)
    steps = tl.sum(keep.to(tl.int32), 0) * (BLOCK // KEYS)
    begin, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    table = block_table + request.to(tl.int64) * table_row
    pages = ids
    if PAGE >= BLOCK:
        pages = tl.load(table + (ids * BLOCK // PAGE) * table_slot, mask=keep, other=0)
    # many rows: in the order of the elements, 16 bytes at a time, and brought to the products' here
    order = q_dim if SMALL else tl.arange(0, DIM)
    at_q = q + token[:, None] * q_strides[0] + head[:, None] * q_strides[1] + order[None, :] * q_strides[2]
    numbers = tl.load(at_q, mask=live[:, None], other=0.0)
    if not SMALL:
        numbers = packed(numbers, DIM, ROWS, FORMAT)
    queries, q_factor = as_queries(numbers, COMPUTE, 1)
    score_factor = q_factor * (scale * factor(k_scale, FORMAT))

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    k_next, v_next = 0, 0
    if PACKED:
        _, start, page = _locate(begin, newest, ids, pages, rank, table, table_slot, BLOCK, PAGE, KEYS)
        key = start + within
        k_next = load_scales(cache, keys, page, group, key % PAGE, None, DIM, FORMAT, False)
        v_next = load_scales(cache, values, page, group, key % PAGE, key <= newest, DIM, FORMAT, True)
    for step in range(begin, end):
        block, start, page = _locate(step, newest, ids, pages, rank, table, table_slot, BLOCK, PAGE, KEYS)
        key = start + within
        k_scales, v_scales = k_next, v_next
        if PACKED:
            _, later, page_after = _locate(step + 1, newest, ids, pages, rank, table, table_slot, BLOCK, PAGE, KEYS)
            after = later + within
            k_next = load_scales(cache, keys, page_after, group, after % PAGE, None, DIM, FORMAT, False)
            v_next = load_scales(cache, values, page_after, group, after % PAGE, after <= newest, DIM, FORMAT, True)
        there, offset = key <= newest, key % PAGE
        k_there = None if PACKED else there  # a hidden key's score is hidden, whatever it is made of
        k_tile = load_keys(
            cache, keys, page, group, offset, k_there, k_scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE, SMALL
        )
        scores = tl.dot(queries, k_tile, input_precision=PRECISION) * score_factor[:, None]
        visible = key[None, :] <= position[:, None]
        theirs = None
        if QT > 1:
            theirs = tl.max((row_ids == block).to(tl.int32), 1) > 0
            visible = visible & theirs[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        v_tile = load_rows(cache, values, page, group, offset, there, v_scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE)
        top, total, acc = accumulate(scores, v_tile, top, total, acc, COMPUTE, PRECISION, theirs)
    if not SMALL:
        acc, dim = natural(acc, DIM, ROWS, FORMAT), tl.arange(0, DIM)
    finish(
        top, total, acc, factor(v_scale, FORMAT), token, head, dim, live, split, partial, partial_lse, out, lse,
        tl.num_programs(1) * GROUP, out_strides, lse_token, lse_head, DIM, SPLITS, LSE,
    )  # fmt: skip
