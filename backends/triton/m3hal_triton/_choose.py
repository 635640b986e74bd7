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
def _tighter(key, wanted, low, high):
    """A higher bound that at least ``wanted`` keys still reach: as many groups of keys have a maximum that reaches it.

    A lane's keys are a group, so a step of this search costs an instruction or two where one over all keys costs two a
    key. Where fewer groups than wanted reach ``low``, it stays.
    """
    LANES: tl.constexpr = 32
    EACH: tl.constexpr = 4 if key.shape[0] >= 128 else key.shape[0] // LANES
    best = tl.max(tl.max(tl.reshape(key, (key.shape[0] // (LANES * EACH), LANES, EACH)), 2), 0)
    reached = tl.sum((best >= low).to(tl.int32), 0)
    while (reached > wanted) & (low < high - 1):
        middle = (low & high) + ((low ^ high) >> 1)
        count = tl.sum((best >= middle).to(tl.int32), 0)
        if count >= wanted:
            low = middle
            reached = count
        else:
            high = middle
    return low


@triton.jit
def place(key, wanted):
    """Where each candidate of key [N] goes among the ``wanted`` chosen; -1 for one that is not chosen."""
    high = tl.max(key, 0) + 1  # fewer than wanted reach it
    low = tl.minimum(tl.min(tl.where(key == ABSENT, NO_LIMIT, key), 0), high - 1)  # at least wanted reach it
    low = _tighter(key, wanted, low, high)
    reached = tl.sum((key >= low).to(tl.int32), 0)
    while (reached > wanted) & (low < high - 1):
        middle = (low & high) + ((low ^ high) >> 1)
        count = tl.sum((key >= middle).to(tl.int32), 0)
        if count >= wanted:
            low = middle
            reached = count
        else:
            high = middle
    above = key > low
    equal = (key == low) & (key != ABSENT)
    # one running count for both: the above in the high half, the equal in the low half
    counts = tl.cumsum(above.to(tl.int32) * 65536 + equal.to(tl.int32), 0)
    spare = wanted - tl.sum(above.to(tl.int32), 0)
    equals_before = counts & 0xFFFF
    chosen = above | (equal & (equals_before <= spare))
    return tl.where(chosen, (counts >> 16) + tl.minimum(equals_before, spare) - 1, -1)
