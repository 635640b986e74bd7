"""Scores of key blocks: two kernels, for few and for many query tokens a request.

A row of a tile is one (query token, index head) pair; all heads share the index key, so the pairs of a request are one
matrix operand and a key block is read once for all of them. Keys past the end are loaded with their page, or with page
0 where the table has none: no key takes part in another's products, and what it gives is hidden afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton import _operands as operands
from m3hal_triton._decode import as_queries, dims, factor, key_dims, load_keys, load_rows, load_scales

#: arguments whose values and addresses make no other kernel
_NUMBERS = ["token_low", "token_high", "blocks", "requests", "table_row", "table_slot"]
_NUMBERS += ["score_token", "score_head", "score_block"]
_ARRAYS = ["cu_q", "seq_lens", "block_table", "first_block", "shares", "scores"]
_FEW = [*_ARRAYS, "rows"]


@triton.jit
def _larger(a, b):
    """max in which NaN wins, as the definition wants."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _pages_of(start, until, table, table_step, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """int64, the page of KEYS keys from start on and before ``until``: one where a page holds them all, else [KEYS]."""
    if PAGE % KEYS == 0:
        page = tl.load(table + start // PAGE * table_step, mask=start < until, other=0)
    else:
        key = start + tl.arange(0, KEYS)
        page = tl.load(table + key // PAGE * table_step, mask=key < until, other=0)
    return page.to(tl.int64)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_FEW)
def score_few(
    index_q,
    cache,
    cu_q,
    seq_lens,
    block_table,
    first_block,
    shares,  # of a plan
    scores,
    rows,  # a descriptor of the cache as rows of a key each, or None
    keys,  # _pages.Part
    blocks,  # that a row of scores has room for
    table_row,
    table_slot,
    score_token,
    score_head,
    score_block,
    q_strides,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,  # at least HEADS times the query tokens of any request, padded for the matrix unit
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    FIRST: tl.constexpr,  # let the next kernel be launched at the start, not the end
    EARLY: tl.constexpr,  # launched before the kernel ahead has ended
    KNOWN: tl.constexpr,  # and after the plan is complete
    TILES: tl.constexpr,  # rows are given, and copied by the unit for tiles
):
    """A share of all requests' blocks, by their real lengths; the plan says where each program's begins."""
    PACKED: tl.constexpr = FORMAT == "nvfp4" or FORMAT == "mxfp4"
    STEPS: tl.constexpr = BLOCK // KEYS
    row = tl.arange(0, ROWS)
    head = row % HEADS
    dim = dims(DIM, FORMAT)
    share = shares + tl.program_id(0) * 8
    if EARLY and not KNOWN:
        tl.extra.cuda.gdc_wait()
        if FIRST:
            tl.extra.cuda.gdc_launch_dependents()
    at, stop, request, base = tl.load(share), tl.load(share + 1), tl.load(share + 2), tl.load(share + 3)
    end, first, last, seq_len = tl.load(share + 4), tl.load(share + 5), tl.load(share + 6), tl.load(share + 7)
    if EARLY and KNOWN:
        tl.extra.cuda.gdc_wait()
        if FIRST:
            tl.extra.cuda.gdc_launch_dependents()
    while at < stop:
        until = tl.minimum(stop, end)
        table = block_table + request.to(tl.int64) * table_row
        token = (first + row // HEADS).to(tl.int64)
        live = (token < last) & (row < ROWS // HEADS * HEADS)
        position = seq_len - (last - token).to(tl.int32)
        at_q = index_q + token[None, :] * q_strides[0] + head[None, :] * q_strides[1] + dim[:, None] * q_strides[2]
        queries, q_factor = as_queries(tl.load(at_q, mask=live[None, :], other=0.0), COMPUTE, 0)
        q_factor = q_factor * factor(None, FORMAT)
        target = scores + token * score_token + head * score_head
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        low, high = (at - base) * STEPS, (until - base) * STEPS
        behind = tl.minimum(seq_len, high * KEYS)
        following = 0
        if PACKED:
            key = low * KEYS + tl.arange(0, KEYS)
            page = _pages_of(low * KEYS, behind, table, table_slot, PAGE, KEYS)
            following = load_scales(cache, keys, page, 0, key % PAGE, None, DIM, FORMAT, False)
        for step in range(low, high):
            start = step * KEYS
            key = start + tl.arange(0, KEYS)
            page = _pages_of(start, behind, table, table_slot, PAGE, KEYS)
            scales = following
            if PACKED:
                later = key + KEYS
                page_after = _pages_of(start + KEYS, behind, table, table_slot, PAGE, KEYS)
                following = load_scales(cache, keys, page_after, 0, later % PAGE, None, DIM, FORMAT, False)
            if TILES:
                tile = rows.load([(page * (keys.page // keys.token)).to(tl.int32) + start % PAGE, 0])
            else:
                tile = load_rows(cache, keys, page, 0, key % PAGE, None, scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE)
            dots = tl.dot(tile, queries, input_precision=PRECISION)
            dots = tl.where(key[:, None] <= position[None, :], dots, float("-inf"))
            here = tl.reduce(dots, 0, _larger)
            best = tl.where(step % STEPS == 0, here, _larger(best, here))
            block = step // STEPS
            where = target + tl.cast(block, tl.int64) * score_block
            tl.store(where, best * q_factor, mask=live & (block + row * 0 < blocks))

        at = until
        if at < stop:
            request += 1  # one without blocks ends where it begins, and is passed by
            base, end = tl.load(first_block + request), tl.load(first_block + request + 1)
            first, last = tl.load(cu_q + request), tl.load(cu_q + request + 1)
            seq_len = tl.load(seq_lens + request)
    if EARLY and not FIRST:  # many programs that wait beside the readers cost these 3 % of their bandwidth
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def score_few_by_warps(
    index_q,
    cache,
    cu_q,
    seq_lens,
    block_table,
    first_block,
    shares,
    scores,
    keys,  # _pages.Part
    blocks,
    table_row,
    table_slot,
    score_token,
    score_head,
    score_block,
    q_strides,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,  # 16
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,  # a multiple of BLOCK
    KEYS: tl.constexpr,  # per step; divides BLOCK
    TOKEN: tl.constexpr,  # keys.token
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    FIRST: tl.constexpr,  # let the next kernel be launched at the start, not the end
    EARLY: tl.constexpr,
):
    """:func:`score_few` by one warp a program, which loads its operands where they are taken (:mod:`_operands`)."""
    STEPS: tl.constexpr = BLOCK // KEYS
    row = tl.arange(0, ROWS)
    head = row % HEADS
    dim = operands.key_dims(FORMAT)
    within = operands.tokens(1, KEYS)
    share = shares + tl.program_id(0) * 8
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if FIRST:
            tl.extra.cuda.gdc_launch_dependents()
    at, stop, request, base = tl.load(share), tl.load(share + 1), tl.load(share + 2), tl.load(share + 3)
    end, first, last, seq_len = tl.load(share + 4), tl.load(share + 5), tl.load(share + 6), tl.load(share + 7)
    while at < stop:
        until = tl.minimum(stop, end)
        table = block_table + request.to(tl.int64) * table_row
        low, high = at - base, until - base
        offset, there = low * BLOCK % PAGE, (low < high).to(tl.int32)
        page = tl.load(table + low * BLOCK // PAGE * table_slot, mask=low < high, other=0).to(tl.int64)
        words = operands.load_keys(cache, keys, page, 0, offset, there, TOKEN, 1, KEYS, FORMAT)
        scales = operands.load_key_scales(cache, keys, page, 0, offset, there, 1, KEYS, FORMAT)
        token = (first + row // HEADS).to(tl.int64)
        live = (token < last) & (row < ROWS // HEADS * HEADS)
        oldest = seq_len - (last - first)  # position of the first query token, and so of row 0
        position = seq_len - (last - token).to(tl.int32)
        at_q = index_q + token[:, None] * q_strides[0] + head[:, None] * q_strides[1] + dim[None, :] * q_strides[2]
        queries, q_factor = as_queries(tl.load(at_q, mask=live[:, None], other=0.0), tl.float16, 1)
        queries = queries[None, :, :]
        q_factor = q_factor * operands.factor(None, FORMAT)
        target = scores + token * score_token + head * score_head
        for block in range(low, high):
            later = (block + 1) * BLOCK
            following = tl.load(table + later // PAGE * table_slot, mask=block + 1 < high, other=0).to(tl.int64)
            best = tl.full((1, ROWS, KEYS), float("-inf"), tl.float32)
            for step in tl.static_range(STEPS):
                tile = tl.zeros((1, operands.DIM, KEYS), tl.float16)
                if tl.num_programs(0) > 0:  # see hidden() of _decode
                    tile = operands.as_keys(words, scales, 1, KEYS, FORMAT, NATIVE)
                dots = tl.dot(queries, tile)
                if step + 1 < STEPS:
                    offset = block * BLOCK % PAGE + (step + 1) * KEYS
                    there = 1
                else:
                    page, offset = following, later % PAGE
                    there = (high > block + 1).to(tl.int32)
                words = operands.load_keys(cache, keys, page, 0, offset, there, TOKEN, 1, KEYS, FORMAT)
                scales = operands.load_key_scales(cache, keys, page, 0, offset, there, 1, KEYS, FORMAT)
                if later > oldest + 1:
                    key = block * BLOCK + step * KEYS + within
                    dots = tl.where(key[:, None, :] <= position[None, :, None], dots, float("-inf"))
                best = _larger(best, dots)
            here = tl.reshape(tl.reduce(best, 2, _larger), (ROWS,))
            where = target + tl.cast(block, tl.int64) * score_block
            tl.store(where, here * q_factor, mask=live & (block + row * 0 < blocks))
        at = until
        if at < stop:
            request += 1
            base, end = tl.load(first_block + request), tl.load(first_block + request + 1)
            first, last = tl.load(cu_q + request), tl.load(cu_q + request + 1)
            seq_len = tl.load(seq_lens + request)
    if EARLY and not FIRST:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(
    do_not_specialize=["blocks", "tokens", "score_token", "score_head"],
    do_not_specialize_on_alignment=["scores", "position_of"],
)
def hide_unseen(
    scores,
    position_of,
    blocks,
    tokens,
    score_token,
    score_head,
    score_block,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,  # the kernel that scores may start beside this one
):
    """-inf for each of ROWS (token, head) pairs in the blocks that the token does not see: all, for one of no request.

    A kernel of its own: inside the one that scores it cost that 9 %.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    real = token < tokens
    position = tl.load(position_of + token, mask=real, other=-1)
    visible = tl.where(position < 0, 0, position // BLOCK + 1)
    at = scores + token.to(tl.int64) * score_token + row % HEADS * score_head
    for first in range(tl.min(tl.where(real, visible, blocks), 0), blocks, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        kept = real[:, None] & (column[None, :] >= visible[:, None]) & (column < blocks)[None, :]
        where = at[:, None] + column.to(tl.int64)[None, :] * score_block
        tl.store(where, tl.full((ROWS, COLUMNS), float("-inf"), tl.float32), mask=kept)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def score_many(
    index_q,
    cache,
    keys,  # _pages.Part
    cu_q,
    seq_lens,
    block_table,
    scores,
    token_low,
    token_high,
    blocks,  # that a row of scores has room for
    requests,
    q_strides,
    table_row,
    table_slot,
    score_token,
    score_head,
    score_block,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,  # at least the requests of any batch
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,  # launched beside hide_unseen, which writes other scores or the same
):
    """Tiles of ROWS // HEADS query tokens of one request, times shares of the blocks that the tile sees.

    Writes the scores of tokens token_low .. token_high-1, at their distance from token_low. Blocks that no row of the
    tile sees stay untouched.
    """
    TOKENS: tl.constexpr = ROWS // HEADS
    b = tl.arange(0, REQUESTS)
    begin = tl.load(cu_q + b, mask=b < requests, other=0)
    tiles = tl.cdiv(tl.load(cu_q + b + 1, mask=b < requests, other=0) - begin, TOKENS)
    ends = tl.cumsum(tiles, 0)
    tile_id = tl.program_id(0)
    request = tl.sum((ends <= tile_id).to(tl.int32), 0)
    share, shares = tl.program_id(1), tl.num_programs(1)
    if EARLY:  # noqa: SIM102 (the compiler decides this one)
        if (tile_id == 0) & (share == 0):  # one that waits is enough
            tl.extra.cuda.gdc_wait()
    if request >= requests:
        return
    before = tl.sum(tl.where(b < request, tiles, 0), 0)
    first = tl.load(cu_q + request) + (tile_id - before) * TOKENS
    last = tl.load(cu_q + request + 1)
    seq_len = tl.load(seq_lens + request)
    newest = tl.minimum(first + TOKENS, last) - 1
    if (newest < token_low) | (first >= token_high) | (seq_len == 0):
        return

    table = block_table + request.to(tl.int64) * table_row
    row = tl.arange(0, ROWS)
    head = row % HEADS
    dim = key_dims(DIM, FORMAT, ROWS < 64)
    token = (first + row // HEADS).to(tl.int64)
    live = (token < last) & (row < TOKENS * HEADS)
    kept = live & (token >= token_low) & (token < token_high)
    position = seq_len - (last - token).to(tl.int32)
    at_q = index_q + token[:, None] * q_strides[0] + head[:, None] * q_strides[1] + dim[None, :] * q_strides[2]
    queries, q_factor = as_queries(tl.load(at_q, mask=live[:, None], other=0.0), COMPUTE, 1)
    q_factor = q_factor * factor(None, FORMAT)
    target = scores + (token - token_low) * score_token + head * score_head

    visible = tl.minimum((seq_len - (last - newest)) // BLOCK + 1, blocks)
    low, high = share * visible // shares, (share + 1) * visible // shares
    everyone = tl.minimum(tl.maximum((seq_len - (last - first) + 1) // BLOCK, low), high)  # every row sees these whole
    STEPS: tl.constexpr = BLOCK // KEYS
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    for step in range(low * STEPS, everyone * STEPS):
        start = step * KEYS
        key = start + tl.arange(0, KEYS)
        page = _pages_of(start, seq_len, table, table_slot, PAGE, KEYS)
        scales = load_scales(cache, keys, page, 0, key % PAGE, None, DIM, FORMAT, False)
        tile = load_keys(cache, keys, page, 0, key % PAGE, None, scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE, ROWS < 64)
        here = tl.reduce(tl.dot(queries, tile, input_precision=PRECISION), 1, _larger)
        best = tl.where(step % STEPS == 0, here, _larger(best, here))
        if step % STEPS == STEPS - 1:
            tl.store(target + tl.cast(step // STEPS, tl.int64) * score_block, best * q_factor, mask=kept)
    for step in range(everyone * STEPS, high * STEPS):
        start = step * KEYS
        key = start + tl.arange(0, KEYS)
        page = _pages_of(start, seq_len, table, table_slot, PAGE, KEYS)
        scales = load_scales(cache, keys, page, 0, key % PAGE, None, DIM, FORMAT, False)
        tile = load_keys(cache, keys, page, 0, key % PAGE, None, scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE, ROWS < 64)
        dots = tl.dot(queries, tile, input_precision=PRECISION)
        here = tl.reduce(tl.where(key[None, :] <= position[:, None], dots, float("-inf")), 1, _larger)
        best = tl.where(step % STEPS == 0, here, _larger(best, here))
        if step % STEPS == STEPS - 1:
            tl.store(target + tl.cast(step // STEPS, tl.int64) * score_block, best * q_factor, mask=kept)
