"""Sparse attention of neighbouring query tokens that chose much the same blocks: they walk the union together.

A unit is a tile of neighbouring tokens of one request and one kv head. Where the union of its blocks is not much
larger than one token's choice, one pass over the union is cheaper than sorting entries by block: results need no
partial sums and no merge. Which units walk is decided on the device; the others are left to :mod:`_sparse_prefill`.
A block that one token chose may hold NaN for another that did not: 0 * NaN shows, and such a unit is left, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from m3hal.layouts import PagedCache
from m3hal.shape import Site
from m3hal_triton import _pages
from m3hal_triton._decode import factor, load_keys, load_rows, native
from m3hal_triton._launch import LOG2_E, common_power_of_two, is_hopper
from m3hal_triton._plan import BatchPlan
from m3hal_triton._softmax import finish

#: arguments whose values and addresses make no other kernel
_NUMBERS = ["tokens", "units", "minimum", "id_token", "id_head", "id_slot", "table_row", "table_slot"]
_NUMBERS += ["lse_token", "lse_head"]
_ARRAYS = ["block_ids", "request_of", "position_of", "seq_lens", "block_table", "sizes", "words", "pages", "walking"]
_ARRAYS += ["k_scale", "v_scale", "lse"]


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _ones(word):
    """How many bits of an int32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word & 0xFF) + ((word >> 8) & 0xFF) + ((word >> 16) & 0xFF) + ((word >> 24) & 0xFF)).to(tl.int32)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def unite(
    block_ids,
    request_of,
    position_of,
    block_table,
    sizes,  # int32 [units]: blocks of the union, 0 where the unit does not walk
    words,  # int32 [units, MOST]: (block << TILE) | which tokens chose it, ascending
    pages,  # int32 [units, MOST]
    walking,  # int32: how many units walk
    tokens,
    id_token,
    id_head,
    id_slot,
    table_row,
    table_slot,
    GROUPS: tl.constexpr,
    IDS: tl.constexpr,
    IDS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    MOST: tl.constexpr,
    PRICE: tl.constexpr,  # of one block of a union, in quarters of an entry of the sort
):
    unit = tl.program_id(0)
    group = unit % GROUPS
    first = unit // GROUPS * TILE
    request = tl.load(request_of + first)
    tl.store(sizes + unit, 0)
    entry = tl.arange(0, TILE * IDS_PADDED)
    token, slot = first + entry // IDS_PADDED, entry % IDS_PADDED
    owner = tl.load(request_of + token, mask=token < tokens, other=-1)
    of_one = tl.min((owner == request).to(tl.int32), 0) > 0
    there = (owner >= 0) & (slot < IDS)
    at = block_ids + token.to(tl.int64) * id_token + group * id_head + slot * id_slot
    ids = tl.load(at, mask=there, other=-1)
    position = tl.load(position_of + token, mask=there, other=-1)
    real = (ids >= 0) & (ids.to(tl.int64) * BLOCK <= position)
    chosen = tl.sum(real.to(tl.int32), 0)
    # blocks modulo 128, a bit for each, are no more than there are blocks: most units are left here
    bit = tl.where(real, 1 << (ids & 31), 0)
    distinct = 0
    for word in tl.static_range(4):
        distinct += _ones(tl.reduce(tl.where((ids >> 5) & 3 == word, bit, 0), 0, _either))
    if of_one & (distinct > 0) & (distinct * PRICE <= chosen * 4):
        key = tl.sort(tl.where(real, ids * TILE + entry // IDS_PADDED, 0x7FFFFFFF))
        real = key != 0x7FFFFFFF
        before = tl.where(entry > 0, tl.gather(key, tl.maximum(entry - 1, 0), 0), -TILE)
        leads = (real & (before // TILE != key // TILE)).to(tl.int32)
        size = tl.sum(leads, 0)
        if (size <= MOST) & (size * PRICE <= chosen * 4):
            # tokens that chose a block are the sum of their bits from its first entry on
            bits = tl.where(real & (before != key), 1 << key % TILE, 0)
            sums = tl.cumsum(bits, 0)
            earlier = tl.associative_scan(leads * (sums - bits), 0, _larger)
            after = tl.where(entry + 1 < TILE * IDS_PADDED, tl.gather(key, (entry + 1) % (TILE * IDS_PADDED), 0), -TILE)
            ends = real & (after // TILE != key // TILE)
            block = key // TILE
            to = unit.to(tl.int64) * MOST + tl.cumsum(leads, 0) - 1
            tl.store(words + to, (block << TILE) | (sums - earlier), mask=ends)
            at_page = block_table + request.to(tl.int64) * table_row + (block * BLOCK // PAGE) * table_slot
            tl.store(pages + to, tl.load(at_page, mask=ends, other=0), mask=ends)
            tl.store(sizes + unit, size)
            tl.atomic_add(walking, 1, sem="relaxed")


@triton.jit
def _walk(
    begin, end, words, pages, cache, keys, values, group, queries, row, position, newest, scale, top, total, acc,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Steps of KEYS keys. EDGE: of blocks that reach into some token's future."""
    STEPS: tl.constexpr = BLOCK // KEYS
    within = tl.arange(0, KEYS)
    # what names a block is loaded a step ahead: the loads of its keys are issued steps ahead, and wait for nothing
    word_next = tl.load(words + begin // STEPS, mask=begin < end, other=0)
    page_next = tl.load(pages + begin // STEPS, mask=begin < end, other=0)
    for step in range(begin, end):
        word, page = word_next, page_next.to(tl.int64)
        word_next = tl.load(words + (step + 1) // STEPS, mask=step + 1 < end, other=0)
        page_next = tl.load(pages + (step + 1) // STEPS, mask=step + 1 < end, other=0)
        start = (word >> TILE) * BLOCK + step % STEPS * KEYS
        key, there = start + within, None
        if EDGE:
            there = key <= newest
        # what varies is a number, so that the addresses of a tile are its sum with what never varies
        at_key, at_value = cache + start % PAGE * keys.token, cache + start % PAGE * values.token
        k_tile = load_keys(at_key, keys, page, group, within, there, 0, DIM, KEYS, FORMAT, COMPUTE, NATIVE, False)
        scores = tl.dot(queries, k_tile)
        if EDGE:
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        chose = (word >> (row // GROUP)) & 1 > 0
        higher = tl.maximum(top, tl.where(chose, tl.max(scores, 1) * scale, -1e38))
        shrink = tl.exp2(top - higher)
        base = tl.where(chose, higher, float("inf"))
        weights = tl.exp2(scores * scale - base[:, None])
        v_tile = load_rows(at_value, values, page, group, within, there, 0, DIM, KEYS, FORMAT, COMPUTE, NATIVE)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(COMPUTE), v_tile, acc)
        top = higher
    return top, total, acc


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ARRAYS)
def attend_union(
    q,
    cache,
    keys,  # _pages.Part
    values,
    k_scale,
    v_scale,
    position_of,
    sizes,
    words,
    pages,
    walking,
    out,
    lse,
    scale,  # includes log2(e)
    units,
    minimum,  # units for which the walk is worth a launch
    q_strides,
    out_strides,
    lse_token,
    lse_head,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MOST: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr,
    LSE: tl.constexpr,
):
    """One unit. The last tokens come first: a prompt's unions grow, and what is long must not start last."""
    ROWS: tl.constexpr = TILE * GROUP
    STEPS: tl.constexpr = BLOCK // KEYS
    unit = units - 1 - tl.program_id(0)
    size = tl.load(sizes + unit)
    if (size == 0) | (tl.load(walking) < minimum):
        return
    group = unit % GROUPS
    first = unit // GROUPS * TILE
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    token = (first + row // GROUP).to(tl.int64)
    head = group * GROUP + row % GROUP
    oldest = tl.load(position_of + first)
    newest = oldest + TILE - 1
    position = oldest + row // GROUP
    queries = tl.load(q + token[:, None] * q_strides[0] + head[:, None] * q_strides[1] + dim[None, :] * q_strides[2])
    words += unit.to(tl.int64) * MOST
    pages += unit.to(tl.int64) * MOST
    # blocks that end before the first token does: ids ascend
    slot = tl.arange(0, MOST)
    blocks = tl.load(words + slot, mask=slot < size, other=0) >> TILE
    past = tl.sum(((slot < size) & ((blocks + 1) * BLOCK <= oldest + 1)).to(tl.int32), 0)
    scale = scale * factor(k_scale, FORMAT)
    top = tl.full((ROWS,), -1e38, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    top, total, acc = _walk(
        0, past * STEPS, words, pages, cache, keys, values, group, queries, row, position, newest, scale, top, total,
        acc, GROUP, TILE, DIM, BLOCK, PAGE, KEYS, FORMAT, COMPUTE, NATIVE, False,
    )  # fmt: skip
    top, total, acc = _walk(
        past * STEPS, size * STEPS, words, pages, cache, keys, values, group, queries, row, position, newest, scale,
        top, total, acc, GROUP, TILE, DIM, BLOCK, PAGE, KEYS, FORMAT, COMPUTE, NATIVE, True,
    )  # fmt: skip
    spoiled = tl.max((total != total).to(tl.int32), 0) + tl.max(tl.max((acc != acc).to(tl.int32), 1), 0)
    if spoiled > 0:
        tl.store(sizes + unit, 0)
        return
    finish(
        top, total, acc, factor(v_scale, FORMAT), token, head, dim, row >= 0, 0, lse, lse, out, lse, GROUPS * GROUP,
        out_strides, lse_token, lse_head, DIM, 1, LSE,
    )  # fmt: skip


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of a walk. price: of one block of a union, in quarters of an entry of the sort."""

    keys: int = 64
    warps: int = 8
    stages: int = 2
    registers: int = 128  # on Hopper, so that two programs share a multiprocessor
    price: int = 15


#: found on an H200, by cache format
WALKS = {"bfloat16": Tuning(), "fp8_e4m3": Tuning(price=19)}
#: elements of a head, at most: sums of more do not fit the registers of two programs a multiprocessor
WIDEST = 128
#: query tokens of a unit
TILE = 8
#: blocks of a union, at most
MOST = 64
#: units for each multiprocessor below which none walks: what one does alone, the sort spreads over all
LEAST = 2


def room(tokens: int, groups: int) -> int:
    """Bytes of a :class:`Walk`; what follows it is aligned as it is."""
    return triton.cdiv(4 * (triton.cdiv(tokens, TILE) * groups * (2 * MOST + 1) + 1), 256) * 256


class Walk:
    """The units of a batch in a workspace. minimum: of units that walk, for any to do so."""

    def __init__(self, workspace: torch.Tensor, tokens: int, site: Site, minimum: int) -> None:
        self.tokens, self.site, self.minimum = tokens, site, minimum
        self.units = triton.cdiv(tokens, TILE) * site.num_kv_heads
        sizes = [self.units * MOST] * 2 + [self.units, 1]
        words = workspace.view(torch.int32)[: sum(sizes)].split(sizes)
        self.words, self.pages, self.sizes, self.walking = words

    def unite(self, block_ids: torch.Tensor, batch: BatchPlan) -> None:
        """Finds which units walk, and over what."""
        self.walking.zero_()
        ids, table = block_ids.shape[2], batch.meta.block_table
        unite[(self.units,)](
            block_ids, batch.request, batch.position, table, self.sizes, self.words, self.pages, self.walking,
            self.tokens, *block_ids.stride(), *table.stride(),
            GROUPS=self.site.num_kv_heads,
            IDS=ids,
            IDS_PADDED=triton.next_power_of_2(ids),
            TILE=TILE,
            BLOCK=self.site.block_size,
            PAGE=self.site.page_size,
            MOST=MOST,
            PRICE=WALKS[self.site.kv_format].price,
            num_warps=1,
        )  # fmt: skip

    def attend(
        self, q: torch.Tensor, kv: PagedCache, batch: BatchPlan, output: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Attention of the units that walk."""
        site, tuning = self.site, WALKS[self.site.kv_format]
        attend_union[(self.units,)](
            q, _pages.memory(kv), _pages.keys(kv), _pages.values(kv), kv.k_scale, kv.v_scale, batch.position,
            self.sizes, self.words, self.pages, self.walking, output, lse, site.scale * LOG2_E, self.units,
            self.minimum, q.stride(), output.stride(), *lse.stride()[:2],
            GROUP=site.num_q_heads // site.num_kv_heads,
            GROUPS=site.num_kv_heads,
            TILE=TILE,
            DIM=site.head_dim,
            BLOCK=site.block_size,
            PAGE=site.page_size,
            KEYS=min(tuning.keys, common_power_of_two(site.block_size)),
            MOST=MOST,
            FORMAT=site.kv_format,
            COMPUTE=tl.bfloat16,
            NATIVE=native(q.device, site.head_dim, site.dtype),
            LSE=site.return_lse,
            num_warps=tuning.warps,
            num_stages=tuning.stages,
            **({"maxnreg": tuning.registers} if is_hopper(q.device) else {}),
        )  # fmt: skip
