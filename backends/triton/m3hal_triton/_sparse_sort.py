"""The counting sort of a sparse prefill: count, offsets, scatter. It serves all pieces of a batch at once.

Entries of units that :mod:`_sparse_union` has served are left out of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: arguments whose values and addresses make no other kernel
_NUMBERS = ["first_token", "tokens", "requests", "slots", "piece", "max_items", "id_token", "id_head", "id_slot"]
_NUMBERS += ["table_row", "table_slot", "minimum"]
_ARRAYS = ["block_ids", "request_of", "position_of", "first_block", "seq_lens", "block_table", "counts", "starts"]
_ARRAYS += ["items", "totals", "ranks", "order", "work", "sizes", "walking"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def count(
    block_ids,
    request_of,
    position_of,
    first_block,
    counts,
    ranks,
    sizes,  # of _sparse_union, as walking
    walking,
    first_token,
    tokens,
    slots,  # counters of one piece
    piece,  # tokens of one piece
    id_token,
    id_head,
    id_slot,
    minimum,  # units for which the walk is worth a launch
    GROUPS: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,  # tokens of a unit; 0 where none walks
):
    """The rank of each entry among those of its block and piece.

    -1 for an entry that selects nothing, -2 for one of a unit that walks its blocks.
    """
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    token, group, slot = entry // (GROUPS * IDS), entry // IDS % GROUPS, entry % IDS
    inside = token < tokens
    block = tl.load(block_ids + token * id_token + group * id_head + slot * id_slot, mask=inside, other=-1)
    position = tl.load(position_of + token, mask=inside, other=-1)
    selects = (block >= 0) & (block.to(tl.int64) * BLOCK <= position)
    nothing = -1
    if TILE > 0:
        size = tl.load(sizes + (first_token + token) // TILE * GROUPS + group, mask=inside, other=0)
        walks = (size > 0) & (tl.load(walking) + size * 0 >= minimum)
        selects = selects & ~walks
        nothing = tl.where(walks, -2, -1)
    request = tl.load(request_of + token, mask=selects, other=0)
    home = (tl.load(first_block + request, mask=selects, other=0) + block) * GROUPS + group
    rank = tl.atomic_add(counts + token // piece * slots + home, 1, mask=selects, sem="relaxed")
    tl.store(ranks + entry, tl.where(selects, rank, nothing), mask=inside)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def offsets(
    counts,
    starts,
    items,
    totals,
    first_block,
    requests,
    slots,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Where each block's entries and work items begin in its piece; the piece's number of work items.

    A work item is one block and up to CHUNK of its entries.
    """
    piece = tl.program_id(0).to(tl.int64)
    used = tl.load(first_block + requests) * GROUPS
    entries_before = tl.zeros((), tl.int32)
    items_before = tl.zeros((), tl.int32)
    for low in range(0, used, WIDE):
        slot = low + tl.arange(0, WIDE)
        n = tl.load(counts + piece * slots + slot, mask=slot < used, other=0)
        work = tl.cdiv(n, CHUNK)
        tl.store(starts + piece * slots + slot, entries_before + tl.cumsum(n, 0) - n, mask=slot < used)
        tl.store(items + piece * slots + slot, items_before + tl.cumsum(work, 0) - work, mask=slot < used)
        entries_before += tl.sum(n, 0)
        items_before += tl.sum(work, 0)
    tl.store(totals + piece, items_before)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def scatter(
    block_ids,
    request_of,
    position_of,
    seq_lens,
    first_block,
    block_table,
    counts,
    starts,
    items,
    ranks,
    order,
    work,  # [pieces, max_items, 8]: first entry, entries, block and head, page, request, its length, and what
    # a token's number within the piece lacks of its position
    tokens,
    slots,
    piece,
    max_items,
    id_token,
    id_head,
    id_slot,
    table_row,
    table_slot,
    GROUPS: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Puts the entries into the order of their blocks, and writes the work items."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    token, group, slot = entry // (GROUPS * IDS), entry // IDS % GROUPS, entry % IDS
    rank = tl.load(ranks + entry, mask=token < tokens, other=-1)
    selects = rank >= 0
    block = tl.load(block_ids + token * id_token + group * id_head + slot * id_slot, mask=selects, other=0)
    request = tl.load(request_of + token, mask=selects, other=0)
    mine = token // piece
    home = mine * slots + (tl.load(first_block + request, mask=selects, other=0) + block) * GROUPS + group
    start = tl.load(starts + home, mask=selects, other=0)
    first_token = mine * piece
    into = order + first_token * (GROUPS * IDS) + start + rank
    tl.store(into, ((token - first_token) * IDS + slot).to(tl.int32), mask=selects)
    leads = selects & (rank % CHUNK == 0)
    n = tl.load(counts + home, mask=leads, other=0)
    item = tl.load(items + home, mask=leads, other=0) + rank // CHUNK
    record = work + (mine * max_items + item) * 8
    page = tl.load(
        block_table + request.to(tl.int64) * table_row + (block * BLOCK // PAGE) * table_slot,
        mask=leads,
        other=0,
    )
    tl.store(record, start + rank, mask=leads)
    tl.store(record + 1, tl.minimum(n - rank, CHUNK), mask=leads)
    tl.store(record + 2, block * GROUPS + group, mask=leads)
    tl.store(record + 3, page, mask=leads)
    tl.store(record + 4, request, mask=leads)
    tl.store(record + 5, tl.load(seq_lens + request, mask=leads, other=0), mask=leads)
    position = tl.load(position_of + token, mask=leads, other=0)
    tl.store(record + 6, position - (token - first_token).to(tl.int32), mask=leads)
