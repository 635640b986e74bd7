"""What comes before the experts' products: tokens in the order of their experts, activations in fp16.

All is found on the device from the ids. A (token, slot) pair has the number ``token * SLOTS + slot``; pairs of one
expert become neighbours, and up to MOST of them make a work item: expert, first position, pairs. An id of -1 is none.
The order among one expert's pairs may differ between runs, no row's result does.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: pairs up to which one kernel sorts them: each program looks at all of them
AT_ONCE = 2048
#: pairs of a program, then and beyond
MINE, PAIRS = 32, 256
_ARRAYS = ["ids", "order", "items", "total", "positions", "counts", "x_factor", "ready"]


def sorters_of(pairs: int) -> int:
    """Programs of :func:`begin` that sort or count."""
    return triton.cdiv(pairs, MINE) + 1 if pairs <= AT_ONCE else triton.cdiv(pairs, PAIRS)


@triton.jit
def expert_of(ids, id_strides, pair, pairs, SLOTS: tl.constexpr, SHARED: tl.constexpr, CACHE: tl.constexpr):
    """Expert of each pair; -1: none. SHARED: whom every token has in its last slot, which no id names; -1: no one."""
    at = ids + pair // SLOTS * id_strides[0] + pair % SLOTS * id_strides[1]
    known = pair < pairs
    if SHARED >= 0:
        is_last = pair % SLOTS == SLOTS - 1
        mine = tl.load(at, mask=known & (pair % SLOTS < SLOTS - 1), other=-1, cache_modifier=CACHE)
        mine = tl.where(known & is_last, SHARED, mine)
    else:
        mine = tl.load(at, mask=known, other=-1, cache_modifier=CACHE)
    return mine


@triton.jit
def _items(items, total, counts, starts, e, MOST: tl.constexpr):
    """The work items of all experts, and how many there are. An expert's have equally many pairs, MOST at most."""
    tiles = tl.cdiv(counts, MOST)
    share = tl.cdiv(counts, tl.maximum(tiles, 1))
    first = tl.cumsum(tiles, 0) - tiles
    tl.store(total, tl.sum(tiles, 0))
    for index in range(tl.max(tiles, 0)):
        record = items + (first + index) * 4
        there = index < tiles
        tl.store(record, e, mask=there)
        tl.store(record + 1, starts + index * share, mask=there)
        tl.store(record + 2, tl.minimum(counts - index * share, share), mask=there)


@triton.jit
def _place(
    ids, id_strides, order, positions, program, pairs,
    SLOTS: tl.constexpr, SHARED: tl.constexpr, MINE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The positions of MINE pairs: how many go to lower experts, and how many before each to its own."""
    pair = program * MINE + tl.arange(0, MINE)
    mine = expert_of(ids, id_strides, pair, pairs, SLOTS, SHARED, "")
    before = tl.zeros((MINE, CHUNK), tl.int32)
    following = expert_of(ids, id_strides, tl.arange(0, CHUNK), pairs, SLOTS, SHARED, "")
    for low in range(0, pairs, CHUNK):
        other, theirs = low + tl.arange(0, CHUNK), following[None, :]
        following = expert_of(ids, id_strides, other + CHUNK, pairs, SLOTS, SHARED, "")
        is_before = (theirs < mine[:, None]) | ((theirs == mine[:, None]) & (other[None, :] < pair[:, None]))
        before += ((theirs >= 0) & is_before).to(tl.int32)
    position = tl.sum(before, 1)
    tl.store(order + position, pair, mask=mine >= 0)
    tl.store(positions + pair, position, mask=mine >= 0)


@triton.jit
def _itemise(
    ids, id_strides, items, total, pairs,
    SLOTS: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Counts all experts' pairs and writes the work items."""
    e = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for low in range(0, pairs, 512):
        mine = expert_of(ids, id_strides, low + tl.arange(0, 512), pairs, SLOTS, SHARED, "")
        counts += tl.histogram(tl.maximum(mine, 0), EXPERTS, mask=mine >= 0)
    _items(items, total, counts, tl.cumsum(counts, 0) - counts, e, MOST)


@triton.jit
def _count(
    ids, id_strides, positions, counts, program, pairs, SLOTS: tl.constexpr, PAIRS: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """The rank of each pair among its expert's, until its position is known."""
    pair = program * PAIRS + tl.arange(0, PAIRS)
    mine = expert_of(ids, id_strides, pair, pairs, SLOTS, SHARED, "")
    rank = tl.atomic_add(counts + mine, 1, mask=mine >= 0, sem="relaxed")
    tl.store(positions + pair, rank, mask=mine >= 0)


@triton.jit
def convert(
    x, x_strides, wide, x_factor, token, size, padded,
    WIDE: tl.constexpr, FOUR_BIT: tl.constexpr, IN_ORDER: tl.constexpr = False,
):  # fmt: skip
    """A token's activations over their power of two, in the order of the products' columns, filled up with zeros.

    IN_ORDER: as they are numbered.
    """
    column = tl.arange(0, WIDE)
    OWN: tl.constexpr = 2 if IN_ORDER else 32 if FOUR_BIT else 16  # of a thread of the products
    within = column // 8 % (OWN // 2) * 2 + column % 2
    element = column // (4 * OWN) * (4 * OWN) + column // 2 % 4 * OWN + within
    at = x + token.to(tl.int64) * x_strides[0] + element * x_strides[1]
    row = tl.load(at, mask=element < size, other=0.0).to(tl.float32)
    exponent = (row.to(tl.int32, bitcast=True) >> 23) & 255
    largest = tl.max(tl.where(exponent < 255, exponent, 0), 0)
    largest = tl.where((largest > 1) & (largest < 253), largest, 127)  # a row of zeros or subnormal numbers stays
    down = ((254 - largest) << 23).to(tl.float32, bitcast=True)
    tl.store(wide + token.to(tl.int64) * padded + column, (row * down).to(tl.float16), mask=column < padded)
    tl.store(x_factor + token, (largest << 23).to(tl.float32, bitcast=True))


@triton.jit(
    do_not_specialize=["tokens", "pairs", "sorters", "most"],
    do_not_specialize_on_alignment=_ARRAYS,
)
def begin(
    x,
    x_strides,
    wide,  # fp16 [T, padded], or None
    x_factor,
    ids,
    id_strides,
    order,
    items,
    total,
    positions,
    counts,  # zeros; not used where this kernel sorts
    tokens,
    pairs,
    sorters,  # programs that sort or count, the last of which may write items; each other one converts a token
    size,
    padded,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    MINE: tl.constexpr,  # pairs of a program that sorts; 0: they are counted, and a second kernel sorts
    PAIRS: tl.constexpr,
    MOST: tl.constexpr,
    WIDE: tl.constexpr,
    FOUR_BIT: tl.constexpr,
    EARLY: tl.constexpr,
    SHARED: tl.constexpr = -1,
    ready=None,  # int32 [most], a counter for each item, which begins at 0
    most=0,
):
    """Sorts pairs, or counts them, and converts tokens."""
    program = tl.program_id(0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if program < sorters:
        if ready is not None and program == sorters - 1:
            for low in range(0, most, EXPERTS):
                at = low + tl.arange(0, EXPERTS)
                tl.store(ready + at, tl.zeros((EXPERTS,), tl.int32), mask=at < most)
        if MINE == 0:
            _count(ids, id_strides, positions, counts, program, pairs, SLOTS, PAIRS, SHARED)
        elif program == sorters - 1:
            _itemise(ids, id_strides, items, total, pairs, SLOTS, SHARED, EXPERTS, MOST)
        else:
            _place(ids, id_strides, order, positions, program, pairs, SLOTS, SHARED, MINE, 256)
    elif wide is not None:
        convert(x, x_strides, wide, x_factor, program - sorters, size, padded, WIDE, FOUR_BIT)


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=_ARRAYS)
def scatter(
    ids,
    id_strides,
    positions,
    counts,
    order,
    items,
    total,
    pairs,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    MOST: tl.constexpr,
    SHARED: tl.constexpr = -1,
):
    """Puts counted pairs into order; program 0 writes the work items."""
    program = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    found = tl.load(counts + e)
    if program == 0:
        _items(items, total, found, tl.cumsum(found, 0) - found, e, MOST)
    pair = program * PAIRS + tl.arange(0, PAIRS)
    mine = expert_of(ids, id_strides, pair, pairs, SLOTS, SHARED, "")
    start = tl.sum(tl.where(e[None, :] < mine[:, None], found[None, :], 0), 1)
    position = start + tl.load(positions + pair, mask=mine >= 0, other=0)
    tl.store(order + position, pair, mask=mine >= 0)
    tl.store(positions + pair, position, mask=mine >= 0)
