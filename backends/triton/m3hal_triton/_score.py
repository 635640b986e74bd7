"""Scores of key blocks: two kernels, for few and for many query tokens a request.

A row of a tile is one (query token, index head) pair; all heads share the index key, so the pairs of a request are one
matrix operand and a key block is read once for all of them. Keys past the end are loaded with their page, or with page
0 where the table has none: no key takes part in another's products, and what it gives is hidden afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from m3hal_triton._decode import as_queries, dims, factor, key_dims, load_keys, load_rows, load_scales

#: arguments whose values and addresses make no other kernel
_NUMBERS = ["token_low", "token_high", "blocks", "requests", "table_row", "table_slot"]
_NUMBERS += ["score_token", "score_head", "score_block"]
_ARRAYS = ["cu_q", "seq_lens", "block_table", "first_block", "shares", "scores"]


@triton.jit
def _larger(a, b):
    """max in which NaN wins, as the definition wants."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _pages_of(start, until, table, table_step, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """int64, the page of KEYS keys from start on and before ``until``: one where a page holds them all, else [KEYS]."""
    if PAGE >= KEYS:
        page = tl.load(table + start // PAGE * table_step, mask=start < until, other=0)
    else:
        key = start + tl.arange(0, KEYS)
        page = tl.load(table + key // PAGE * table_step, mask=key < until, other=0)
    return page.to(tl.int64)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def score_few(
    index_q,
    cache,
    keys,  # _pages.Part
    cu_q,
    seq_lens,
    block_table,
    first_block,
    shares,  # of a plan
    scores,
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
    EARLY: tl.constexpr,  # launched before the kernel ahead has ended
):
    """A share of all requests' blocks, by their real lengths; the plan says where each program's begins."""
    PACKED: tl.constexpr = FORMAT == "nvfp4" or FORMAT == "mxfp4"
    STEPS: tl.constexpr = BLOCK // KEYS
    row = tl.arange(0, ROWS)
    head = row % HEADS
    dim = dims(DIM, FORMAT)
    share = shares + tl.program_id(0) * 8
    if EARLY:
        tl.extra.cuda.gdc_wait()
    at, stop, request, base = tl.load(share), tl.load(share + 1), tl.load(share + 2), tl.load(share + 3)
    end, first, last, seq_len = tl.load(share + 4), tl.load(share + 5), tl.load(share + 6), tl.load(share + 7)
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
    if EARLY:  # not at the start: programs that wait beside the readers cost these 3 % of their bandwidth
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def score_few_by_warps(
    index_q,
    cache,
    keys,  # _pages.Part
    cu_q,
    seq_lens,
    block_table,
    first_block,
    shares,
    scores,
    blocks,
    table_row,
    table_slot,
    score_token,
    score_head,
    score_block,
    q_strides,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,  # per step; divides BLOCK and PAGE
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """:func:`score_few` by one warp a program: it exchanges nothing, and codes become operands where they are."""
    STEPS: tl.constexpr = BLOCK // KEYS
    row = tl.arange(0, ROWS)
    head = row % HEADS
    dim = key_dims(DIM, FORMAT, ROWS < 64)
    within = tl.arange(0, KEYS)
    share = shares + tl.program_id(0) * 8
    if EARLY:
        tl.extra.cuda.gdc_wait()
    at, stop, request, base = tl.load(share), tl.load(share + 1), tl.load(share + 2), tl.load(share + 3)
    end, first, last, seq_len = tl.load(share + 4), tl.load(share + 5), tl.load(share + 6), tl.load(share + 7)
    while at < stop:
        until = tl.minimum(stop, end)
        table = block_table + request.to(tl.int64) * table_row
        token = (first + row // HEADS).to(tl.int64)
        live = (token < last) & (row < ROWS // HEADS * HEADS)
        position = seq_len - (last - token).to(tl.int32)
        at_q = index_q + token[:, None] * q_strides[0] + head[:, None] * q_strides[1] + dim[None, :] * q_strides[2]
        queries, q_factor = as_queries(tl.load(at_q, mask=live[:, None], other=0.0), COMPUTE, 1)
        q_factor = q_factor * factor(None, FORMAT)
        target = scores + token * score_token + head * score_head
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        low, high = (at - base) * STEPS, (until - base) * STEPS
        behind = tl.minimum(seq_len, high * KEYS)
        page = tl.load(table + low * KEYS // PAGE * table_slot, mask=low < high, other=0).to(tl.int64)
        following = load_scales(cache, keys, page, 0, low * KEYS % PAGE + within, None, DIM, FORMAT, False)
        for step in range(low, high):
            start = step * KEYS
            page = tl.load(table + start // PAGE * table_slot, mask=start < behind, other=0).to(tl.int64)
            scales = following
            if FORMAT == "nvfp4" or FORMAT == "mxfp4":
                later = start + KEYS
                page_after = tl.load(table + later // PAGE * table_slot, mask=later < behind, other=0).to(tl.int64)
                following = load_scales(cache, keys, page_after, 0, later % PAGE + within, None, DIM, FORMAT, False)
            offset = start % PAGE + within
            tile = load_keys(cache, keys, page, 0, offset, None, scales, DIM, KEYS, FORMAT, COMPUTE, NATIVE, ROWS < 64)
            dots = tl.dot(queries, tile, input_precision=PRECISION)
            dots = tl.where((start + within)[None, :] <= position[:, None], dots, float("-inf"))
            here = tl.reduce(dots, 1, _larger)
            best = tl.where(step % STEPS == 0, here, _larger(best, here))
            if step % STEPS == STEPS - 1:
                block = step // STEPS
                where = target + tl.cast(block, tl.int64) * score_block
                tl.store(where, best * q_factor, mask=live & (block + row * 0 < blocks))
        at = until
        if at < stop:
            request += 1
            base, end = tl.load(first_block + request), tl.load(first_block + request + 1)
            first, last = tl.load(cu_q + request), tl.load(cu_q + request + 1)
            seq_len = tl.load(seq_lens + request)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _hide(rows, kept, first, end, step, ROWS: tl.constexpr):
    """-inf in blocks first .. end-1 of the kept among rows [ROWS], which are pointers."""
    for block in range(first, end, 32):
        column = block + tl.arange(0, 32)
        at = rows[:, None] + column.to(tl.int64)[None, :] * step
        tl.store(at, tl.full((ROWS, 32), float("-inf"), tl.float32), mask=kept[:, None] & (column < end)[None, :])


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
    FILL: tl.constexpr,  # write -inf where a token sees no block, and for tokens of no request
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles of ROWS // HEADS query tokens of one request, times shares of the blocks that the tile sees.

    Writes the scores of tokens token_low .. token_high-1, at their distance from token_low. Blocks that no row of the
    tile sees stay untouched, unless FILL. There is a tile more than the requests need at most.
    """
    TOKENS: tl.constexpr = ROWS // HEADS
    b = tl.arange(0, REQUESTS)
    begin = tl.load(cu_q + b, mask=b < requests, other=0)
    tiles = tl.cdiv(tl.load(cu_q + b + 1, mask=b < requests, other=0) - begin, TOKENS)
    ends = tl.cumsum(tiles, 0)
    tile_id = tl.program_id(0)
    request = tl.sum((ends <= tile_id).to(tl.int32), 0)
    share, shares = tl.program_id(1), tl.num_programs(1)
    if request >= requests:
        if FILL:
            needed = tl.sum(tiles, 0)
            spare = (tile_id - needed) * shares + share
            spares = (tl.num_programs(0) - needed) * shares
            for token in range(tl.load(cu_q + requests) + spare, token_high, spares):
                one = tl.arange(0, ROWS)
                at = scores + tl.cast(token - token_low, tl.int64) * score_token + one * score_head
                _hide(at, (one < HEADS) & (one * 0 + token >= token_low), 0, blocks, score_block, ROWS)
        return
    before = tl.sum(tl.where(b < request, tiles, 0), 0)
    first = tl.load(cu_q + request) + (tile_id - before) * TOKENS
    last = tl.load(cu_q + request + 1)
    seq_len = tl.load(seq_lens + request)
    newest = tl.minimum(first + TOKENS, last) - 1
    if (newest < token_low) | (first >= token_high) | ((seq_len == 0) & (not FILL)):
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

    visible = tl.where(seq_len == 0, 0, tl.minimum((seq_len - (last - newest)) // BLOCK + 1, blocks))
    if FILL:
        unseen = blocks - visible
        _hide(
            target, kept, visible + share * unseen // shares, visible + (share + 1) * unseen // shares, score_block, ROWS
        )
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
