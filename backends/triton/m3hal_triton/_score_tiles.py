"""Block scores of a decode over bf16 keys on Hopper, where first blocks are located while the kernel ahead runs.

Located, not read: that kernel may write any of them. A block without a token of its own request need not be complete,
as another request of the batch may share it and write it now. Written in Gluon, as Triton has no word for tiles that
are asked for at one place and awaited at another. A tile is a block, and lies in shared memory until all its rows'
products are done.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from m3hal_triton._hopper import all_warps, ask, launch_next, wait

#: keys of a tile, their numbers, and tiles of a program: two programs fill a multiprocessor's shared memory
KEYS, DIM, TILES = gl.constexpr(128), gl.constexpr(128), gl.constexpr(3)
BYTES = gl.constexpr(128 * 128 * 2)
WARPS = gl.constexpr(4)

#: arguments whose values and addresses make no other kernel
_NUMBERS = ["blocks", "table_row", "table_slot", "score_token", "score_head", "score_block"]
_ARRAYS = ["cache", "cu_q", "seq_lens", "block_table", "first_block", "shares", "scores", "rows"]


@gluon.jit
def _larger(a, b):
    """max in which NaN wins, as the definition wants."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _row(block, base, request, table, table_row, table_slot, page_rows, there, PAGE: gl.constexpr):
    """Where a block begins among the cache's rows. base: the request's first block, as blocks of all are counted."""
    start = (block - base) * KEYS
    page = gl.load(table + request.to(gl.int64) * table_row + start // PAGE * table_slot, mask=there, other=0)
    return page * page_rows + start % PAGE


@gluon.jit
def _next(
    block, stop, request, base, end, first_block, table, table_row, table_slot, page_rows, PAGE: gl.constexpr
):  # fmt: skip
    """The block after ``block``: whose it is, and its row, which nobody waits for yet."""
    block += 1
    while (block >= end) & (block < stop):
        request += 1
        base = end
        end = gl.load(first_block + request + 1)
    row = _row(block, base, request, table, table_row, table_slot, page_rows, block < stop, PAGE)
    return block, request, base, end, row


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def score_tiles(
    index_q,
    cache,  # behind rows
    cu_q,
    seq_lens,
    block_table,
    first_block,
    shares,  # of a plan
    scores,
    rows,  # a descriptor of the cache as rows of a key each
    keys,  # _pages.Part
    blocks,  # that a row of scores has room for
    table_row,
    table_slot,
    score_token,
    score_head,
    score_block,
    q_strides,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,  # at least HEADS times the query tokens of any request, padded for the matrix unit
    PAGE: gl.constexpr,  # a multiple of KEYS
    KNOWN: gl.constexpr,  # launched after the plan is complete
    AHEAD: gl.constexpr,  # the next kernel may be launched at once, not at the end
):
    """A share of all requests' blocks, by their real lengths; the plan says where each program's begins."""
    products: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    by_row: gl.constexpr = gl.SliceLayout(0, products)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    tiles = gl.allocate_shared_memory(rows.dtype, [TILES, KEYS, DIM], rows.layout)
    queries = gl.allocate_shared_memory(rows.dtype, [ROWS, DIM], rows.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(TILES):
        mbarrier.init(arrived.index(slot), count=1)
    if not KNOWN:
        wait()
    if AHEAD:
        launch_next()  # which may read the plan at once
    share = shares + gl.program_id(0) * 8
    at, stop, request, base = gl.load(share), gl.load(share + 1), gl.load(share + 2), gl.load(share + 3)
    end, first, last, seq_len = gl.load(share + 4), gl.load(share + 5), gl.load(share + 6), gl.load(share + 7)
    page_rows = keys.page // keys.token
    asked = at
    if KNOWN:
        one = gl.minimum(stop, end)  # where the first request's blocks end
        starts = ()
        for slot in gl.static_range(TILES):
            there = at + slot < one
            start = _row(at + slot, base, request, block_table, table_row, table_slot, page_rows, there, PAGE)
            starts = starts + (start,)  # noqa: RUF005 - Gluon knows no starred tuple
        wait()
        for slot in gl.static_range(TILES):
            ask(rows, starts[slot], 0, arrived, tiles, slot, at + slot < one, BYTES)
        asked = gl.maximum(at, gl.minimum(one, at + TILES))
    asked, a_request, a_base, a_end, a_row = _next(
        asked - 1, stop, request, base, end, first_block, block_table, table_row, table_slot, page_rows, PAGE
    )
    while asked < gl.minimum(stop, at + TILES):
        ask(rows, a_row, 0, arrived, tiles, asked - at, True, BYTES)
        asked, a_request, a_base, a_end, a_row = _next(
            asked, stop, a_request, a_base, a_end, first_block, block_table, table_row, table_slot, page_rows, PAGE
        )

    q_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, q_layout))
    q_dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, q_layout))
    row = gl.arange(0, ROWS, layout=by_row)
    within = gl.arange(0, KEYS, layout=gl.SliceLayout(1, products))
    nothing = gl.zeros([KEYS, ROWS], gl.float32, layout=products)
    slot, phase, block = 0, 0, at
    while block < stop:
        q_token = (first + q_row // HEADS).to(gl.int64)
        q_live = (q_token < last) & (q_row < ROWS // HEADS * HEADS)
        at_q = (
            index_q + (q_token * q_strides[0] + q_row % HEADS * q_strides[1])[:, None] + q_dim[None, :] * q_strides[2]
        )
        queries.store(gl.load(at_q, mask=q_live[:, None], other=0.0))
        fence_async_shared()
        all_warps()
        token = (first + row // HEADS).to(gl.int64)
        live = (token < last) & (row < ROWS // HEADS * HEADS)
        position = seq_len - (last - token).to(gl.int32)
        target = scores + token * score_token + row % HEADS * score_head
        until = gl.minimum(stop, end)
        while block < until:
            mbarrier.wait(arrived.index(slot), phase)
            dots = warpgroup_mma(tiles.index(slot), queries.permute((1, 0)), nothing, use_acc=False)
            all_warps()  # no warp reads the tile any more
            if asked < stop:
                ask(rows, a_row, 0, arrived, tiles, slot, True, BYTES)
                asked, a_request, a_base, a_end, a_row = _next(
                    asked, stop, a_request, a_base, a_end, first_block, block_table, table_row, table_slot, page_rows,
                    PAGE,
                )  # fmt: skip
            key = (block - base) * KEYS + within
            dots = gl.where(key[:, None] <= position[None, :], dots, float("-inf"))
            best = gl.reduce(dots, 0, _larger)
            where = target + gl.cast(block - base, gl.int64) * score_block
            gl.store(where, best, mask=live & (block - base < blocks))
            block += 1
            slot += 1
            if slot == TILES:
                slot = 0
                phase ^= 1
        if block < stop:
            request += 1  # one without blocks ends where it begins, and is passed by
            base, end = gl.load(first_block + request), gl.load(first_block + request + 1)
            first, last = gl.load(cu_q + request), gl.load(cu_q + request + 1)
            seq_len = gl.load(seq_lens + request)
    if not AHEAD:
        launch_next()
