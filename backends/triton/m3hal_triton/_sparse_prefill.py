"""Sparse attention when requests bring many query tokens: organised by key block.

Each selection (token, kv head, slot) is an entry. Entries are sorted by the block they name (:mod:`_sparse_sort`), a
program takes one block and up to CHUNK of its entries, gathers their queries into matrix tiles, and writes each entry's
partial sums; a last kernel merges the k sums of a token. So a block is read once for many queries. All partial sums
depend on their own query and block only, and the merge runs in the order of the ids: a row's bits do not depend on the
rest of the batch, nor on the order in which the sort's atomics arrive.

Partial sums are in fp16, each row over a power of two of its own. In bf16, with three bits less, a row is wrong by more
than its own rounding where the results of its blocks cancel.

Tokens come in pieces, so that the partial results fit into the workspace; the sort serves all pieces at once. Entries
of units that :mod:`_sparse_union` has served are left out of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._decode import factor, load_keys, load_rows, load_scales, natural, packed
from m3hal_triton._softmax import LN_2, accumulate

#: arguments whose values and addresses make no other kernel
_NUMBERS = ["tokens", "first_token", "table_row", "table_slot", "lse_token", "lse_head"]
_ARRAYS = ["block_table", "totals", "ranks", "order", "work", "sums", "lse"]


@triton.jit
def _tiles(
    cache, keys, values, page, head, offset, there,
    DIM: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Keys [DIM, KEYS] and values [KEYS, DIM] in the order of the elements: they meet many gathered queries."""
    k_scales = load_scales(cache, keys, page, head, offset, there, DIM, FORMAT, False)
    v_scales = load_scales(cache, values, page, head, offset, there, DIM, FORMAT, True)
    if FORMAT == "nvfp4":
        k_rows = load_rows(cache, keys, page, head, offset, there, k_scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE)
        k_tile = tl.trans(natural(k_rows, DIM, KEYS, FORMAT))
    else:
        k_tile = load_keys(cache, keys, page, head, offset, there, k_scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE, False)
    v_tile = load_rows(cache, values, page, head, offset, there, v_scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE)
    return k_tile, natural(v_tile, DIM, KEYS, FORMAT)


@triton.jit
def _fetched(q, first_token, token, head, live, q_strides, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Queries [ROWS, DIM] of tokens of the piece. PAIRS: as int32 [ROWS, DIM // 2], for :func:`_unpaired`.

    A loop hands int32 on as they are, and takes bf16 apart and puts it together at each turn.
    """
    row = (first_token + token.to(tl.int64))[:, None]
    if PAIRS:
        of_row = row * (q_strides[0] // 2) + head[:, None] * (q_strides[1] // 2)
        at = q.to(tl.pointer_type(tl.int32)) + of_row + tl.arange(0, DIM // 2)[None, :]
    else:
        of_row = row * q_strides[0] + head[:, None] * q_strides[1]
        at = q + of_row + tl.arange(0, DIM)[None, :] * q_strides[2]
    return tl.load(at, mask=live[:, None])


@triton.jit
def _unpaired(pairs, ROWS: tl.constexpr, DIM: tl.constexpr):
    """bf16 [ROWS, DIM] of int32 [ROWS, DIM // 2]."""
    even, odd = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return tl.reshape(tl.join(even, odd), (ROWS, DIM)).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def attend_block(
    q,
    cache,
    keys,  # _pages.Part
    values,
    k_scale,
    order,
    work,
    totals,
    block_table,
    partial,
    sums,
    scale,  # includes log2(e)
    first_token,
    tokens,  # of the piece
    q_strides,
    table_row,
    table_slot,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    IDS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,  # whether queries are fetched two elements at a time
):
    """One work item: for each entry the sum over the block's keys of exponentials, and of exponentials times values
    without their global factor.

    Both over exp2 of a number that is stored beside the first, see :func:`_paired`. They lie [kv
    head, token, slot, query head of the group]: an entry's are neighbours. A program keeps the whole block when KEYS is
    BLOCK; otherwise it walks the block once for each tile of queries.
    """
    item = tl.program_id(0)
    if item >= tl.load(totals):
        return
    start = tl.load(work + item * 8)
    n = tl.load(work + item * 8 + 1)
    which = tl.load(work + item * 8 + 2)
    page_of = tl.load(work + item * 8 + 3)
    request = tl.load(work + item * 8 + 4)
    seq_len = tl.load(work + item * 8 + 5)
    shift = tl.load(work + item * 8 + 6)  # position of the piece's first token, were it this request's
    block, group = which // GROUPS, which % GROUPS
    edge = shift < (block + 1) * BLOCK - 1  # whether a token of the piece may lie within the block
    QUERIES: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    head = group * GROUP + row % GROUP
    scale = scale * factor(k_scale, FORMAT)
    partial += group.to(tl.int64) * tokens * (IDS * GROUP * DIM)
    sums += group.to(tl.int64) * tokens * (IDS * GROUP)
    whole: tl.constexpr = (KEYS == BLOCK) and (PAGE >= BLOCK)
    if whole:
        key = block * BLOCK + tl.arange(0, BLOCK)
        k_tile, v_tile = _tiles(
            cache, keys, values, page_of.to(tl.int64), group, key % PAGE, key < seq_len, DIM, KEYS, FORMAT, COMPUTE,
            NATIVE,
        )  # fmt: skip

    # queries are fetched one tile ahead and entries two: the gather hides behind the products. What is masked stays
    # unset: it reaches no row that is stored
    of_tile = tl.where(row < QUERIES * GROUP, row // GROUP, 1 << 30)
    order = order.to(tl.pointer_type(tl.uint32)) + start + of_tile  # quotients of unsigned numbers are cheaper
    live_next = of_tile < n
    entry_next = tl.load(order, mask=live_next)
    queries_next = _fetched(q, first_token, entry_next // IDS, head, live_next, q_strides, DIM, PAIRS)
    entry_after = tl.load(order + QUERIES, mask=of_tile < n - QUERIES)
    for done in tl.range(0, n, QUERIES, num_stages=1):
        entry, live, queries = entry_next, live_next, queries_next
        if PAIRS:
            queries = _unpaired(queries, ROWS, DIM)
        if whole:
            scores = tl.dot(queries, k_tile, input_precision=PRECISION)
        entry_next = entry_after
        live_next = of_tile < n - done - QUERIES
        queries_next = _fetched(q, first_token, entry_next // IDS, head, live_next, q_strides, DIM, PAIRS)
        entry_after = tl.load(order + done + 2 * QUERIES, mask=of_tile < n - done - 2 * QUERIES)
        if whole:
            if edge:
                scores = tl.where(key[None, :] <= ((entry // IDS).to(tl.int32) + shift)[:, None], scores, float("-inf"))
            top = tl.maximum(tl.max(scores, 1) * scale, -1e38)
            weights = tl.exp2(scores * scale - top[:, None])
            total = tl.sum(weights, 1)
            acc = tl.dot(weights.to(COMPUTE), v_tile, input_precision=PRECISION)
        else:
            top = tl.full((ROWS,), -1e38, tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, DIM), tl.float32)
            table = block_table + request.to(tl.int64) * table_row
            queries = packed(queries, DIM, ROWS, FORMAT)
            for low in range(0, BLOCK, KEYS):
                part = block * BLOCK + low + tl.arange(0, KEYS)
                there = part < seq_len
                pages = tl.load(table + (part // PAGE) * table_slot, mask=there, other=0).to(tl.int64)
                # in the order of the codes: triton 3.6 does not compile a loop that brings a tile to the elements'
                at = part % PAGE
                k_scales = load_scales(cache, keys, pages, group, at, there, DIM, FORMAT, False)
                v_scales = load_scales(cache, values, pages, group, at, there, DIM, FORMAT, True)
                some_keys = load_keys(
                    cache, keys, pages, group, at, there, k_scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE, False
                )
                some_values = load_rows(
                    cache, values, pages, group, at, there, v_scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE
                )
                scores = tl.dot(queries, some_keys, input_precision=PRECISION) * scale
                scores = tl.where(
                    part[None, :] <= ((entry // IDS).to(tl.int32) + shift)[:, None], scores, float("-inf")
                )
                top, total, acc = accumulate(scores, some_values, top, total, acc, COMPUTE, PRECISION)
            acc = natural(acc, DIM, ROWS, FORMAT)
        out_row = (entry * GROUP).to(tl.int32) + row % GROUP
        to = partial + out_row[:, None] * DIM + dim[None, :]
        if partial.dtype.element_ty == tl.float16:
            top, total, acc = _lowered(top, total, acc, BLOCK, FORMAT)
        # larger than the cache, and not to displace the keys there
        tl.store(to, acc.to(partial.dtype.element_ty), mask=live[:, None], eviction_policy="evict_first")
        tl.store(sums + out_row, _paired(top, total), mask=live)


@triton.jit
def _lowered(top, total, acc, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """The same as exp2(top) * (total, acc), with a whole number for top, and the largest of a row of acc below 2**15.

    Powers from 2**-109 on, so that total stays a number; fp16 has all its bits down to 2**-29 of the largest. An
    infinity hides a row's largest number: the others are over 2**4 then. Whole numbers are not rounded when they meet,
    below 2**24: beside larger ones all powers are alike, so that blocks of equal scores keep their shares.
    Codes are 2**-9 at least and have a largest, of which fp16 holds all sums.
    """
    if FORMAT == "fp8_e4m3":
        largest = tl.full(top.shape, 448.0 * BLOCK, tl.float32)
    elif FORMAT == "nvfp4":
        largest = tl.full(top.shape, 2 * 6 * 448.0 * BLOCK, tl.float32)  # twice, see factor
    else:
        largest = tl.where(tl.abs(top) < 8388608.0, tl.max(tl.abs(acc), 1), float("inf"))
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.where(exponent == 255, 145, tl.maximum(exponent, 32))
    above = tl.ceil(top)
    lower = ((268 - exponent) << 23).to(tl.float32, bitcast=True) * tl.exp2(top - above)
    return above + (exponent - 141).to(tl.float32), total * lower, acc * lower[:, None]


@triton.jit
def _paired(top, total):
    """Two fp32 in an int64: one load or store."""
    high, low = total.to(tl.int32, bitcast=True).to(tl.int64), top.to(tl.int32, bitcast=True).to(tl.int64)
    return (high << 32) | (low & 0xFFFFFFFF)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def merge(
    partial,
    sums,
    ranks,
    v_scale,
    out,
    lse,
    first_token,
    tokens,  # of the piece
    out_strides,
    lse_token,
    lse_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    IDS: tl.constexpr,
    IDS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    LSE: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
):
    """HEADS_AT_ONCE rows of the result: the softmax over a head's blocks."""
    first_head = tl.program_id(0) * HEADS_AT_ONCE
    local = tl.program_id(1).to(tl.int64)
    token = first_token + local
    slot = tl.arange(0, IDS_PADDED)
    dim = tl.arange(0, DIM)
    rank = tl.load(ranks + (local * GROUPS + first_head // GROUP) * IDS + slot, mask=slot < IDS, other=-1)
    if tl.min(rank, 0) == -2:
        return  # written where the blocks were walked
    value_factor = factor(v_scale, FORMAT)
    for which in tl.static_range(HEADS_AT_ONCE):
        head = first_head + which
        row = ((head // GROUP * tokens + local) * IDS + slot) * GROUP + head % GROUP
        pair = tl.load(sums + row, mask=rank >= 0, other=0)
        at = partial + row[:, None] * DIM + dim[None, :]
        part = tl.load(at, mask=(rank >= 0)[:, None], other=0.0, eviction_policy="evict_first")
        top = tl.where(rank >= 0, pair.to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
        bits = (pair >> 32).to(tl.int32)
        # a power of two above the largest block's sum
        base = tl.max(top + ((bits >> 23) - 126).to(tl.float32), 0)
        base = tl.where(base == float("-inf"), 0.0, base)
        weight = tl.exp2(top - base)
        total = tl.sum(bits.to(tl.float32, bitcast=True) * weight, 0)
        empty = total == 0
        result = tl.sum(part.to(tl.float32) * weight[:, None], 0) * (value_factor / tl.where(empty, 1.0, total))
        at = out + token * out_strides[0] + head * out_strides[1] + dim * out_strides[2]
        tl.store(at, result.to(out.dtype.element_ty))
        if LSE:
            natural = tl.where(empty, float("-inf"), (base + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
            tl.store(lse + token * lse_token + head * lse_head, natural)
