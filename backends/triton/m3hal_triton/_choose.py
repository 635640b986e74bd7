"""The selection rule, shared by every kernel that ranks blocks: threshold search instead of sorting.

Scores become integers in the order of the rule (forced, then by score, NaN last, absent never); a binary search finds
the k-th largest; everything above it is chosen, and of the equal ones the first. Candidates are numbered in ascending
order of their ids, so a running count gives each chosen one its place and the result is ascending without a sort.
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
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(scores != scores, NAN, key)
    key = tl.where(forced, FORCED, key)
    return tl.where(present, key, ABSENT)


@triton.jit
def place(key, present, wanted, forced):
    """Where each candidate of key [C, L, E] goes among the ``wanted`` chosen; -1 for one that is not chosen.

    present: how many are not absent, at least ``wanted``. forced: how many are forced. They stand so far above all
    scores that a search from there would halve its range seven times before it met one.

    Candidate (c, l, e) is number (l * C + c) * E + e: l is a thread, which holds neighbours and counts them by itself.
    """
    WARPS: tl.constexpr = key.shape[1] // 32
    largest = tl.max(tl.max(tl.where(key == FORCED, ABSENT, key), 2), 0)
    high = tl.where(forced < wanted, tl.max(largest, 0), FORCED) + 1  # fewer than wanted reach it
    low = tl.min(tl.min(tl.min(tl.where(key == ABSENT, NO_LIMIT, key), 2), 0), 0)  # all that are present reach it
    if WARPS > 1:  # two of each warp reach the least of the warps' second largest
        by_warp = tl.reshape(largest, (WARPS, 32))
        second = tl.max(tl.where(by_warp < tl.max(by_warp, 1)[:, None], by_warp, ABSENT), 1)
        low = tl.where(wanted - forced <= 2 * WARPS, tl.maximum(low, tl.min(second, 0)), low)
    reached = present
    while (reached > wanted) & (low < high - 1):
        middle = (low & high) + ((low ^ high) >> 1)
        upper = (middle & high) + ((middle ^ high) >> 1)
        # two counts at once, one in the high half: a step of several warps is mostly their meeting
        counts = _sum(tl.where(key >= upper, 65536, 0) + (key >= middle).to(tl.int32))
        count = counts & 0xFFFF
        if count < wanted:
            high = middle
        elif (counts >> 16) < wanted:
            low = middle
            high = upper
            reached = count
        else:
            low = upper
            reached = counts >> 16
    if reached == wanted:
        chosen = (key >= low) & (key != ABSENT)
        places = _running(chosen.to(tl.int32)) - 1
    else:  # equal ones at the limit
        above = key > low
        equal = (key == low) & (key != ABSENT)
        # one running count for both: the above in the high half, the equal in the low half
        counts = _running(above.to(tl.int32) * 65536 + equal.to(tl.int32))
        spare = wanted - _sum(above.to(tl.int32))
        equals_before = counts & 0xFFFF
        chosen = above | (equal & (equals_before <= spare))
        places = (counts >> 16) + tl.minimum(equals_before, spare) - 1
    return tl.where(chosen, places, -1)


@triton.jit
def _sum(x):
    """Of all of [C, L, E]."""
    return tl.sum(tl.sum(tl.sum(x, 2), 0), 0)


@triton.jit
def _running(x):
    """Running sums of [C, L, E] in the order of the candidates' numbers."""
    along = tl.cumsum(x, 2)
    chunk = tl.sum(x, 2)
    lane = tl.sum(chunk, 0)
    before = tl.cumsum(lane, 0) - lane
    return along + (tl.cumsum(chunk, 0) - chunk + before[None, :])[:, :, None]
