"""Sparse decode of one query token a request over bf16 caches on Hopper, in parts.

What takes its time is a chain of latencies, so it is short: the table is read while the kernel ahead runs, tiles are
copied by the unit for them, and a product has 64 rows of which 16 matter, because then a row of scores belongs to four
lanes and warps exchange nothing. Rows past the 16 hold whatever shared memory held, and are not stored. A part is one
tile or a few, so what is done once a part counts as much as what is done once a tile: sums are stored as they are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from m3hal_triton._hopper import all_warps, ask, launch_next, touch, wait

#: rows of a product, those that matter at most, keys of a tile, and their numbers
ROWS, LIVE, KEYS, DIM = gl.constexpr(64), gl.constexpr(16), gl.constexpr(64), gl.constexpr(128)
WARPS = gl.constexpr(4)
#: ids of a row at most, one for a lane
LANES = gl.constexpr(32)
#: pages of a request that are read before it is known which are wanted
WIDE = gl.constexpr(512)

#: arguments whose values and addresses make no other kernel
_NUMBERS = ["requests", "table_width", "id_token", "id_head", "id_slot", "table_row", "table_slot"]
_ARRAYS = ["cache", "rows", "block_ids", "request_of", "position_of", "block_table", "partial_top"]


@gluon.jit
def _of_step(step, rank, x, PARTS: gl.constexpr):
    """What the block of a step has in x [LANES]; rank: the place of each lane's block among the steps' blocks."""
    return gl.sum(gl.where(rank == step // PARTS, x, 0), 0) + step % PARTS * KEYS


@gluon.jit
def _ask_both(rows, row, columns, k_arrived, v_arrived, k_tiles, v_tiles, slot, there):
    ask(rows, row, columns[0], k_arrived, k_tiles, slot, there, KEYS * DIM * 2)
    ask(rows, row, columns[1], v_arrived, v_tiles, slot, there, KEYS * DIM * 2)


@gluon.jit
def _hide(values, shown):
    """Zeros in place of the values of keys from ``shown`` on, which may be NaN and have no part in a sum."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    values.store(gl.where((key < shown)[:, None], values.load(layout), 0.0))
    fence_async_shared()
    all_warps()


@gluon.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def attend_tiles(
    q,
    cache,  # behind rows
    block_ids,
    request_of,
    position_of,
    block_table,
    partial,
    partial_top,  # largest scores, and behind them sums of weights
    rows,  # a descriptor of the cache as rows of a key and a value each
    scale,  # includes log2(e)
    places,  # rows from a page, and from a head, to the next; columns of keys and of values
    requests,
    table_width,
    q_strides,
    id_token,
    id_head,
    id_slot,
    table_row,
    table_slot,
    GROUP: gl.constexpr,  # query heads per kv head
    IDS: gl.constexpr,
    BLOCK: gl.constexpr,  # a multiple of KEYS
    PAGE: gl.constexpr,  # a multiple of BLOCK
    TILES: gl.constexpr,  # of keys, and of values, in shared memory
    SPLITS: gl.constexpr,
    KNOWN: gl.constexpr,  # launched after the plan is complete
):
    """One of SPLITS parts of a token's blocks, for the heads of a kv head; :func:`merge_splits` merges them."""
    PARTS: gl.constexpr = BLOCK // KEYS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    k_tiles = gl.allocate_shared_memory(rows.dtype, [TILES, KEYS, DIM], rows.layout)
    v_tiles = gl.allocate_shared_memory(rows.dtype, [TILES, KEYS, DIM], rows.layout)
    queries = gl.allocate_shared_memory(rows.dtype, [ROWS, DIM], rows.layout)
    k_arrived = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    v_arrived = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for tile in gl.static_range(TILES):
        mbarrier.init(k_arrived.index(tile), count=1)
        mbarrier.init(v_arrived.index(tile), count=1)
    split, group, work = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    token = work.to(gl.int64)
    lane = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [LANES], [WARPS], [0]))
    launch_next()
    if not KNOWN:
        wait()
    request = gl.load(request_of + work)
    newest = gl.load(position_of + work)  # -1 without a request: nothing is reachable, and the part is empty
    # a decode's tokens mostly belong to the requests of their number
    entry = gl.arange(0, WIDE, layout=gl.BlockedLayout([WIDE // (LANES * WARPS)], [LANES], [WARPS], [0]))
    known = (entry < table_width) & (work < requests)
    near = gl.load(block_table + token * table_row + entry * table_slot, mask=known, other=0)
    touch(partial, lane)
    if KNOWN:
        wait()
    at_ids = block_ids + token * id_token + group * id_head + lane * id_slot
    ids = gl.load(at_ids, mask=lane < IDS, other=-1)
    row = gl.arange(0, LIVE, layout=gl.SliceLayout(1, q_layout))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, q_layout))
    at_q = q + token * q_strides[0] + ((group * GROUP + row) * q_strides[1])[:, None] + (dim * q_strides[2])[None, :]
    numbers = gl.load(at_q, mask=(row < GROUP)[:, None], other=0.0)
    keep = (ids >= 0) & (ids.to(gl.int64) * BLOCK <= newest)
    kept = gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "=r,r",
        [keep.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    before = kept & ((1 << lane) - 1)
    rank = gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [before], dtype=gl.int32, is_pure=True, pack=1)
    rank = gl.where(keep, rank, -1)
    steps = gl.sum(keep.to(gl.int32), 0) * PARTS
    begin, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    index = ids * BLOCK // PAGE
    pages = near.gather(gl.minimum(gl.maximum(index, 0), WIDE - 1), 0)
    far = keep & ((index >= WIDE) | (request != work))
    at_page = block_table + request.to(gl.int64) * table_row + index.to(gl.int64) * table_slot
    pages = gl.load(at_page, mask=far, other=pages)
    place = pages * places[0] + group * places[1] + ids * BLOCK % PAGE
    columns = (places[2], places[3])
    for tile in gl.static_range(TILES):
        first = _of_step(begin + tile, rank, place, PARTS)
        _ask_both(rows, first, columns, k_arrived, v_arrived, k_tiles, v_tiles, tile, begin + tile < end)
    queries.slice(0, LIVE, 0).store(numbers)
    fence_async_shared()
    all_warps()

    top = gl.full([ROWS], float("-inf"), gl.float32, layout=by_row)
    total = gl.zeros([ROWS], gl.float32, layout=by_row)
    acc = gl.zeros([ROWS, DIM], gl.float32, layout=layout)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, layout=s_layout)
    within = gl.arange(0, KEYS, layout=gl.SliceLayout(0, s_layout))
    tile, phase = 0, 0
    for step in range(begin, end):
        shown = newest + 1 - _of_step(step, rank, ids * BLOCK, PARTS)  # keys of the tile that are not hidden
        mbarrier.wait(k_arrived.index(tile), phase)
        scores = warpgroup_mma(queries, k_tiles.index(tile).permute((1, 0)), nothing, use_acc=False)
        scores = gl.where((within < shown)[None, :], scores, float("-inf"))
        higher = gl.maximum(top, gl.convert_layout(gl.max(scores, 1), by_row))
        base = gl.where(higher == float("-inf"), 0.0, higher) * scale
        weights = gl.exp2(scores * scale - gl.convert_layout(base, gl.SliceLayout(1, s_layout))[:, None])
        more = gl.convert_layout(gl.sum(weights, 1), by_row)
        if TILES == 1:
            total = more
        else:
            shrink = gl.exp2(top * scale - base)
            total = total * shrink + more
            acc = acc * shrink[:, None]
        top = higher
        mbarrier.wait(v_arrived.index(tile), phase)
        if shown < KEYS:
            _hide(v_tiles.index(tile), shown)
        operand = gl.convert_layout(weights.to(rows.dtype), gl.DotOperandLayout(0, layout, 2))
        acc = warpgroup_mma(operand, v_tiles.index(tile), acc)
        if step + TILES < end:
            all_warps()  # none reads the tiles any more
            first = _of_step(step + TILES, rank, place, PARTS)
            _ask_both(rows, first, columns, k_arrived, v_arrived, k_tiles, v_tiles, tile, True)
        tile += 1
        if tile == TILES:
            tile = 0
            phase ^= 1
    row = gl.arange(0, ROWS, layout=by_row)
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    part = ((token * gl.num_programs(1) + group) * GROUP + row) * SPLITS + split
    partial_total = partial_top + gl.num_programs(2) * gl.num_programs(1) * (GROUP * SPLITS)
    gl.store(partial + part[:, None] * DIM + dim[None, :], acc, mask=(row < GROUP)[:, None])
    gl.store(partial_top + part, top * scale, mask=row < GROUP)
    gl.store(partial_total + part, total, mask=row < GROUP)
