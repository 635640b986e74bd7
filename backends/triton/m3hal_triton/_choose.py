"""The selection rule, shared by every kernel that ranks blocks: threshold search instead of sorting.

Scores become integers in the order of the rule (forced, then by score, NaN last, absent never); a binary search finds
the k-th largest; everything above it is chosen, and of the equal ones the first. Candidates come in ascending order of
their ids, so a running count gives each chosen one its place and the result is ascending without a sort.
"""

from __future__ import annotations

import triton
import triton.language as tl

# order keys: int32 order is the order of the rule
ABSENT = tl.constexpr(-(2**31))
NAN = tl.constexpr(-(2**31) + 1)
FORCED = tl.constexpr(2**31 - 2)
NO_LIMIT = tl.constexpr(2**31 - 1)


@triton.jit
def order_key(scores, forced, present):
    """fp32 scores as int32 order keys; equal scores (also -0.0 and 0.0) have equal keys."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(scores != scores, NAN, key)
    key = tl.where(forced, FORCED, key)
    return tl.where(present, key, ABSENT)


@triton.jit
def place(key, wanted):
    """Where each candidate of key [R, N] goes among the chosen of its row; -1 for one that is not chosen.

    wanted int32 [R]: how many are chosen; a row has at least as many present candidates.
    """
    high = tl.max(key, 1) + 1  # fewer than wanted reach it
    low = tl.min(tl.where(key == ABSENT, NO_LIMIT, key), 1)  # at least wanted reach it
    low = tl.minimum(low, high - 1)
    reached = tl.sum((key >= low[:, None]).to(tl.int32), 1)
    open_rows = tl.max(((reached > wanted) & (low < high - 1)).to(tl.int32), 0)
    while open_rows > 0:
        middle = (low & high) + ((low ^ high) >> 1)
        count = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
        up = count >= wanted
        low = tl.where(up, middle, low)
        reached = tl.where(up, count, reached)
        high = tl.where(up, high, middle)
        open_rows = tl.max(((reached > wanted) & (low < high - 1)).to(tl.int32), 0)
    above = key > low[:, None]
    equal = (key == low[:, None]) & (key != ABSENT)
    # one running count for both: the above in the high half, the equal in the low half
    counts = tl.cumsum(above.to(tl.int32) * 65536 + equal.to(tl.int32), 1)
    spare = (wanted - tl.sum(above.to(tl.int32), 1))[:, None]
    equals_before = counts & 0xFFFF
    chosen = above | (equal & (equals_before <= spare))
    return tl.where(chosen, (counts >> 16) + tl.minimum(equals_before, spare) - 1, -1)


@triton.jit
def choose_visible(
    scores,  # of candidate 0
    score_row,
    score_block,
    visible,
    out,
    out_row,
    out_slot,
    rows,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Chooses for ``rows`` rows among blocks 0 .. visible-1 (visible scalar, <= BLOCKS) and writes their ids."""
    row = tl.arange(0, ROWS)
    block = tl.arange(0, BLOCKS)
    alive = (row < rows)[:, None]
    present = (block < visible)[None, :] & (row >= 0)[:, None]
    value = tl.load(
        scores + row[:, None] * score_row + block[None, :].to(tl.int64) * score_block,
        mask=present & alive,
        other=0.0,
        cache_modifier=".cg",
    )
    forced = ((block < INIT) | (block >= visible - LOCAL))[None, :] & present
    wanted = tl.zeros((ROWS,), tl.int32) + tl.minimum(visible, TOPK)
    position = place(order_key(value, forced, present), wanted)
    at = out + row[:, None] * out_row + position * out_slot
    tl.store(at, block[None, :] + tl.zeros_like(position), mask=(position >= 0) & alive)
    slot = tl.arange(0, TOPK_PADDED)
    tail = (slot >= visible)[None, :] & (slot < TOPK)[None, :] & alive
    tl.store(
        out + row[:, None] * out_row + slot[None, :] * out_slot, tl.full((ROWS, TOPK_PADDED), -1, tl.int32), mask=tail
    )
