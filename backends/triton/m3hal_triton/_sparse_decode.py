"""Sparse attention when a request brings few query tokens: decode and multi-token verify.

One program takes up to QT tokens of a request and one kv head, and walks the *union* of the blocks that those tokens
selected, so that a block is read once. Small batches split the union over several programs, and a second kernel merges
their partial results in the order of the splits. (A merge by the program that finishes last was slower: its vectors of
row weights change layout through shared memory for each split, 4.5 us against 1.5 us for a launch.)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    q,
    k,
    v,
    block_ids,
    cu_q,
    seq_lens,
    block_table,
    partial,
    partial_lse,
    out,
    lse,
    scale,  # includes log2(e)
    tokens,
    requests,
    chunks,  # programs along the tokens of one request
    q_token,
    q_head,
    q_dim,
    k_page,
    k_head,
    k_slot,
    k_dim,
    v_page,
    v_head,
    v_slot,
    v_dim,
    id_token,
    id_head,
    id_slot,
    table_row,
    table_slot,
    out_token,
    out_head,
    out_dim,
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
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,  # let the merge be launched now; it waits for this kernel's end by itself
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0)
    group = tl.program_id(1)
    work = tl.program_id(2)
    request = work // chunks
    first = tl.load(cu_q + request) + work % chunks * QT
    last = tl.load(cu_q + request + 1)
    owned = tl.load(cu_q + requests)
    seq_len = tl.load(seq_lens + request)

    row = tl.arange(0, ROWS)
    head = group * GROUP + row % GROUP
    dim = tl.arange(0, DIM)
    if split == 0:  # tokens that belong to no request: rows of zeros
        for token in range(owned + work, tokens, tl.num_programs(2)):
            one = row < GROUP
            at = out + tl.cast(token, tl.int64) * out_token + head[:, None] * out_head + dim[None, :] * out_dim
            tl.store(at, tl.zeros((ROWS, DIM), out.dtype.element_ty), mask=one[:, None])
            if LSE:
                tl.store(lse + tl.cast(token, tl.int64) * lse_token + head * lse_head, float("-inf"), mask=one)
    if first >= last:
        return

    token = (first + row // GROUP).to(tl.int64)
    live = (token < last) & (row < QT * GROUP)
    position = seq_len - (last - token).to(tl.int32)
    queries = tl.load(
        q + token[:, None] * q_token + head[:, None] * q_head + dim[None, :] * q_dim, mask=live[:, None], other=0.0
    )

    # the union of the tokens' blocks, in the order of first occurrence
    entry = tl.arange(0, QT * IDS_PADDED)
    id_of = (first + entry // IDS_PADDED).to(tl.int64)
    slot = entry % IDS_PADDED
    ids = tl.load(
        block_ids + id_of * id_token + group * id_head + slot * id_slot, mask=(id_of < last) & (slot < IDS), other=-1
    )
    reachable = (ids >= 0) & (ids.to(tl.int64) * BLOCK <= seq_len - (last - id_of))
    keep = reachable
    if QT > 1:
        earlier = (ids[:, None] == ids[None, :]) & reachable[None, :] & (entry[None, :] < entry[:, None])
        keep = reachable & (tl.max(earlier.to(tl.int32), 1) == 0)
    rank = tl.where(keep, tl.cumsum(keep.to(tl.int32), 0) - 1, -1)
    count = tl.sum(keep.to(tl.int32), 0)
    table = block_table + request.to(tl.int64) * table_row
    if PAGE >= BLOCK:
        pages = tl.load(table + (ids * BLOCK // PAGE) * table_slot, mask=keep, other=0)
    if QT > 1:  # which rows selected the block
        column = tl.arange(0, IDS_PADDED)
        row_ids = tl.load(
            block_ids + token[:, None] * id_token + group * id_head + column[None, :] * id_slot,
            mask=live[:, None] & (column < IDS)[None, :],
            other=-1,
        )

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    STEPS: tl.constexpr = BLOCK // KEYS
    for step in range(split * count // SPLITS * STEPS, (split + 1) * count // SPLITS * STEPS):
        here = rank == step // STEPS
        block = tl.sum(tl.where(here, ids, 0), 0)
        start = block * BLOCK + step % STEPS * KEYS
        if PAGE >= BLOCK:
            page = tl.sum(tl.where(here, pages, 0), 0).to(tl.int64)
        else:
            page = tl.load(table + (start // PAGE) * table_slot).to(tl.int64)
        key = start + tl.arange(0, KEYS)
        written = key < seq_len
        keys = tl.load(
            k + page * k_page + group * k_head + (key % PAGE)[None, :] * k_slot + dim[:, None] * k_dim,
            mask=written[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        visible = key[None, :] <= position[:, None]
        if QT > 1:
            visible = visible & (tl.max((row_ids == block).to(tl.int32), 1) > 0)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            v + page * v_page + group * v_head + (key % PAGE)[:, None] * v_slot + dim[None, :] * v_dim,
            mask=written[:, None],
            other=0.0,
        )
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        top = higher

    seen = total > 0
    result = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    result = tl.where((total != total)[:, None], float("nan"), result)
    base2 = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    base2 = tl.where(total != total, float("nan"), base2)
    if SPLITS > 1:
        part = (token * (tl.num_programs(1) * GROUP) + head) * SPLITS + split
        tl.store(partial + part[:, None] * DIM + dim[None, :], result, mask=live[:, None])
        tl.store(partial_lse + part, base2, mask=live)
    else:
        at = out + token[:, None] * out_token + head[:, None] * out_head + dim[None, :] * out_dim
        tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None])
        if LSE:
            tl.store(lse + token * lse_token + head * lse_head, base2 * 0.6931471805599453, mask=live)


@triton.jit
def merge_splits(
    partial,
    partial_lse,
    request_of,
    out,
    lse,
    heads,
    out_token,
    out_head,
    out_dim,
    lse_token,
    lse_head,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    LSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row of the result: a token's head, over its splits. Tokens without a request have their result already."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    request = tl.load(request_of + token)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM)
    part = (token * heads + head) * SPLITS + split
    if EARLY:
        tl.extra.cuda.gdc_wait()
    real, wide = request + split * 0 >= 0, request + dim * 0 >= 0
    base2 = tl.load(partial_lse + part, mask=real, other=float("-inf"))
    values = tl.load(partial + part[:, None] * DIM + dim[None, :], mask=real[:, None], other=0.0)
    top = tl.max(base2, 0)
    weight = tl.exp2(base2 - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    empty = total == 0
    result = tl.sum(values * weight[:, None], 0) / tl.where(empty, 1.0, total)
    tl.store(out + token * out_token + head * out_head + dim * out_dim, result.to(out.dtype.element_ty), mask=wide)
    if LSE:
        natural = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
        tl.store(lse + token * lse_token + head * lse_head, natural, mask=request >= 0)
