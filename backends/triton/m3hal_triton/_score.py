"""Scores of key blocks: two kernels, for few and for many query tokens a request.

A row of a tile is one (query token, index head) pair; all heads share the index key, so the pairs of a request are one
matrix operand and a key block is read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    """max in which NaN wins, as the definition wants."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def score_few(
    index_q,
    keys,
    cu_q,
    seq_lens,
    block_table,
    first_block,
    scores,
    blocks,  # that a row of scores has room for
    requests,
    q_token,
    q_head,
    q_dim,
    k_page,
    k_slot,
    k_dim,
    table_row,
    table_slot,
    score_token,
    score_head,
    score_block,
    HEADS: tl.constexpr,
    QT: tl.constexpr,  # at least the query tokens of any request
    ROWS: tl.constexpr,  # QT * HEADS, padded for the matrix unit
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    REQUESTS: tl.constexpr,  # padded
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,  # let the choice be launched now; it waits for this kernel's end by itself
):
    """Equal shares of all requests' blocks, by their real lengths, over whatever number of programs runs."""
    program = tl.program_id(0)
    b = tl.arange(0, REQUESTS)
    ends = tl.load(first_block + 1 + b, mask=b < requests, other=2**31 - 1)
    everything = tl.load(first_block + requests)
    share = tl.maximum(tl.cdiv(everything, tl.num_programs(0)), 1)
    at = program * share
    stop = tl.minimum(at + share, everything)
    row = tl.arange(0, ROWS)
    head = row % HEADS
    dim = tl.arange(0, DIM)
    STEPS: tl.constexpr = BLOCK // KEYS
    while at < stop:
        request = tl.sum((ends <= at).to(tl.int32), 0)
        base = tl.load(first_block + request)
        end = tl.load(first_block + request + 1)
        first = tl.load(cu_q + request)
        last = tl.load(cu_q + request + 1)
        seq_len = tl.load(seq_lens + request)
        until = tl.minimum(stop, end)
        table = block_table + request.to(tl.int64) * table_row
        token = (first + row // HEADS).to(tl.int64)
        live = (token < last) & (row < QT * HEADS)
        position = seq_len - (last - token).to(tl.int32)
        queries = tl.load(
            index_q + token[None, :] * q_token + head[None, :] * q_head + dim[:, None] * q_dim,
            mask=live[None, :],
            other=0.0,
        )
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        for step in range((at - base) * STEPS, (until - base) * STEPS):
            block = step // STEPS
            start = step * KEYS
            if PAGE >= KEYS:
                page = tl.load(table + (start // PAGE) * table_slot).to(tl.int64)
                offset = (start % PAGE + tl.arange(0, KEYS))[:, None] * k_slot
            else:
                key_of = start + tl.arange(0, KEYS)
                pages = tl.load(table + (key_of // PAGE) * table_slot, mask=key_of < seq_len, other=0).to(tl.int64)
                page = 0
                offset = pages[:, None] * k_page + (key_of % PAGE)[:, None] * k_slot
            key = start + tl.arange(0, KEYS)
            tile = tl.load(
                keys + page * k_page + offset + dim[None, :] * k_dim, mask=(key < seq_len)[:, None], other=0.0
            )
            dots = tl.dot(tile, queries, input_precision=PRECISION)
            dots = tl.where(key[:, None] <= position[None, :], dots, float("-inf"))
            here = tl.reduce(dots, 0, _larger)
            best = tl.where(step % STEPS == 0, here, _larger(best, here))
            where = scores + token * score_token + head * score_head + tl.cast(block, tl.int64) * score_block
            tl.store(where, best, mask=live & (block + row * 0 < blocks))

        at = until
    if EARLY:  # not at the start: programs that wait beside the readers cost these 3 % of their bandwidth
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def score_many(
    index_q,
    keys,
    cu_q,
    seq_lens,
    block_table,
    scores,
    token_low,
    token_high,
    blocks,  # that a row of scores has room for
    requests,
    q_token,
    q_head,
    q_dim,
    k_page,
    k_slot,
    k_dim,
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
    REQUESTS: tl.constexpr,
    PRECISION: tl.constexpr,
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
    dim = tl.arange(0, DIM)
    token = (first + row // HEADS).to(tl.int64)
    live = (token < last) & (row < TOKENS * HEADS)
    kept = live & (token >= token_low) & (token < token_high)
    position = seq_len - (last - token).to(tl.int32)
    queries = tl.load(
        index_q + token[:, None] * q_token + head[:, None] * q_head + dim[None, :] * q_dim,
        mask=live[:, None],
        other=0.0,
    )
    target = scores + (token - token_low) * score_token + head * score_head

    visible = tl.minimum((seq_len - (last - newest)) // BLOCK + 1, blocks)
    share, shares = tl.program_id(1), tl.num_programs(1)
    low, high = share * visible // shares, (share + 1) * visible // shares
    everyone = tl.minimum(tl.maximum((seq_len - (last - first) + 1) // BLOCK, low), high)  # every row sees these whole
    STEPS: tl.constexpr = BLOCK // KEYS
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    for step in range(low * STEPS, everyone * STEPS):
        start = step * KEYS
        key = start + tl.arange(0, KEYS)
        if PAGE >= KEYS:
            page = tl.load(table + (start // PAGE) * table_slot).to(tl.int64)
            offset = (start % PAGE + tl.arange(0, KEYS))[None, :] * k_slot
        else:
            pages = tl.load(table + (key // PAGE) * table_slot).to(tl.int64)
            page = 0
            offset = pages[None, :] * k_page + (key % PAGE)[None, :] * k_slot
        tile = tl.load(keys + page * k_page + offset + dim[:, None] * k_dim)
        here = tl.reduce(tl.dot(queries, tile, input_precision=PRECISION), 1, _larger)
        best = tl.where(step % STEPS == 0, here, _larger(best, here))
        if step % STEPS == STEPS - 1:
            tl.store(target + tl.cast(step // STEPS, tl.int64) * score_block, best, mask=kept)
    for step in range(everyone * STEPS, high * STEPS):
        start = step * KEYS
        key = start + tl.arange(0, KEYS)
        written = key < seq_len
        pages = tl.load(table + (key // PAGE) * table_slot, mask=written, other=0).to(tl.int64)
        offset = pages[None, :] * k_page + (key % PAGE)[None, :] * k_slot
        tile = tl.load(keys + offset + dim[:, None] * k_dim, mask=written[None, :], other=0.0)
        dots = tl.dot(queries, tile, input_precision=PRECISION)
        here = tl.reduce(tl.where(key[None, :] <= position[:, None], dots, float("-inf")), 1, _larger)
        best = tl.where(step % STEPS == 0, here, _larger(best, here))
        if step % STEPS == STEPS - 1:
            tl.store(target + tl.cast(step // STEPS, tl.int64) * score_block, best, mask=kept)
