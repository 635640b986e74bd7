"""Structured inputs, reproducible from the name of a case.

Random numbers alone hide faults: softmax over 2,048 random keys averages the values to a forty-fifth of their size, so
that a kernel which drops a whole block, or returns zeros, stays within the tolerances in use. Here values carry the
number of their block, keys give every block a mass of its own, and energy sits where kernels cut: in the tail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import SeqMeta
from m3hal_conformance.bounds import bits


def seed(case: str) -> int:
    """A seed that depends on nothing but the case's name."""
    return int.from_bytes(hashlib.sha256(case.encode()).digest()[:7], "big")


def generator(case: str) -> torch.Generator:
    """A CPU generator for one case; draw on the CPU and move, so that every device gets the same numbers."""
    return torch.Generator().manual_seed(seed(case))


def boundary_lengths(size: int, upto: int) -> list[int]:
    """1 and every multiple of ``size`` up to ``upto``, each with its neighbours."""
    near = {multiple + step for multiple in range(size, upto + 1, size) for step in (-1, 0, 1)}
    return sorted(length for length in near | {1} if 0 < length <= upto)


def tail_heavy(*shape: int, rng: torch.Generator) -> Tensor:
    """Normal numbers whose last eighth of the last axis holds two thirds of the energy: a lost tail is a lost row."""
    numbers = torch.randn(*shape, generator=rng)
    tail = max(1, shape[-1] // 8)
    numbers[..., -tail:] *= (2 * (shape[-1] - tail) / tail) ** 0.5 if shape[-1] > tail else 1.0
    return numbers


def hot_routing(tokens: int, experts: int, k: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights fp32 and ids int32 [tokens, k]: expert 1 is in every row, the last expert in none, order shuffled."""
    others = [expert for expert in range(experts - 1) if expert != 1]
    ids = torch.stack(
        [
            torch.tensor([1, *(others[i] for i in torch.randperm(len(others), generator=rng)[: k - 1].tolist())])[
                torch.randperm(k, generator=rng)
            ]
            for _ in range(tokens)
        ]
    )
    weights = torch.rand(tokens, k, generator=rng) + 0.25
    return 2.0 * weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


@dataclass(frozen=True)
class Batch:
    """Requests over a shuffled set of pages.

    lengths: (query tokens, tokens in all) of each request. pages: how many a cache needs. Page 0 belongs to nobody: a
    row of the block table is surrounded by it, before its first entry and past its last.
    """

    lengths: tuple[tuple[int, int], ...]
    page_size: int
    pages: int
    meta: SeqMeta

    @property
    def tokens(self) -> int:
        """Query tokens of all requests."""
        return sum(queries for queries, _ in self.lengths)

    def slots(self, request: int) -> Tensor:
        """int64 [seq_len]: the slot of every token of a request."""
        position = torch.arange(self.lengths[request][1])
        page = self.meta.block_table[request].long()[position // self.page_size]
        return page * self.page_size + position % self.page_size

    def query_slots(self) -> Tensor:
        """int64 [tokens]: the slot of every query token; -1 in a padded request."""
        parts = [
            self.slots(request)[-queries:] if length else torch.full((queries,), -1)
            for request, (queries, length) in enumerate(self.lengths)
            if queries
        ]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])

    def rows(self, request: int) -> slice:
        """The request's query tokens in the flat token axis."""
        start = sum(queries for queries, _ in self.lengths[:request])
        return slice(start, start + self.lengths[request][0])

    def cache(
        self,
        layout: KVLayout,
        keys: Sequence[Tensor],
        values: Sequence[Tensor] | None,
        write: Callable[[PagedCache, Tensor, Tensor | None, Tensor], None],
    ) -> PagedCache:
        """A cache that holds each request's keys and values [seq_len, H, D], written by ``write``; the rest is NaN."""
        cache = layout.empty(self.pages)
        bits(cache.buf).fill_(-1 if cache.buf.element_size() > 1 else 0xFF)
        for request in range(len(self.lengths)):
            write(cache, keys[request], None if values is None else values[request], self.slots(request))
        return cache

    def only(self, requests: Sequence[int]) -> Batch:
        """The same requests in the same pages, fewer of them."""
        lengths = tuple(self.lengths[request] for request in requests)
        table = self.meta.block_table[list(requests)]
        return Batch(lengths, self.page_size, self.pages, _meta(lengths, table, self.meta.max_q, self.meta.max_k))


def batch(lengths: Sequence[tuple[int, int]], page_size: int, rng: torch.Generator, *, max_k: int = 0) -> Batch:
    """Requests of (query tokens, tokens in all) in shuffled pages; (n, 0) is a padded request.

    max_k: host bound of the lengths; the longest length when 0.
    """
    needed = [-(-length // page_size) for _, length in lengths]
    width = max([1, *needed]) + 1
    order = (torch.randperm(sum(needed), generator=rng) + 1).tolist()
    framed = torch.zeros(len(lengths), width + 1, dtype=torch.int32)  # one entry of page 0 before each row
    for row, count in enumerate(needed):
        framed[row, 1 : count + 1] = torch.tensor(order[:count], dtype=torch.int32)
        order = order[count:]
    longest_q = max([0, *(queries for queries, _ in lengths)])
    longest_k = max_k or max([0, *(length for _, length in lengths)])
    meta = _meta(tuple(lengths), framed[:, 1:], longest_q, longest_k)
    return Batch(tuple(lengths), page_size, sum(needed) + 2, meta)


def _meta(lengths: tuple[tuple[int, int], ...], block_table: Tensor, max_q: int, max_k: int) -> SeqMeta:
    queries = torch.tensor([0, *(query for query, _ in lengths)], dtype=torch.int32)
    return SeqMeta(
        cu_q=queries.cumsum(0).to(torch.int32),
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        block_table=block_table,
        max_q=max_q,
        max_k=max_k,
    )


@dataclass(frozen=True)
class AttentionInputs:
    """q [T, Hq, D]; keys and values of each request [S, Hkv, D]; all fp32, exactly representable in bf16."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def attention_inputs(
    requests: Batch, q_heads: int, kv_heads: int, dim: int, block_size: int, rng: torch.Generator
) -> AttentionInputs:
    """Attention over blocks that can be told apart.

    With scale ``dim ** -0.5`` every block of a request has a mass of its own, unequal by factors of e, and the last key
    of a sequence alone has about a tenth. A value has its block's number in one coordinate, its kv head in the size of
    it, and noise elsewhere: a lost, doubled or swapped block, head or tail turns a large part of the output row.
    """
    tail = torch.nn.functional.normalize(torch.randn(dim, generator=rng), dim=0)
    q = torch.randn(requests.tokens, q_heads, dim, generator=rng)
    q += (dim**0.5 - q @ tail)[..., None] * tail  # every query has sqrt(dim) along the tail's direction
    keys, values = [], []
    for _, length in requests.lengths:
        block = torch.arange(length) // block_size
        codes = torch.randn(-(-length // block_size) + 1, kv_heads, dim, generator=rng)
        codes -= (codes @ tail)[..., None] * tail
        key = codes[block] + 0.1 * torch.randn(length, kv_heads, dim, generator=rng)
        key[-1:] += torch.log(torch.tensor(length / 4.0 + 1.0)) * tail
        value = 0.1 * torch.randn(length, kv_heads, dim, generator=rng)
        coordinate = (block % dim)[:, None, None].expand(-1, kv_heads, 1)
        value.scatter_add_(-1, coordinate, (1.0 + torch.arange(kv_heads)).expand(length, -1)[..., None])
        keys.append(_bf16(key))
        values.append(_bf16(value))
    return AttentionInputs(_bf16(q), keys, values)


def index_inputs(
    requests: Batch, heads: int, dim: int, block_size: int, rng: torch.Generator
) -> tuple[Tensor, list[Tensor]]:
    """index_q [T, Hi, Di] and each request's index keys [S, 1, Di], fp32, exactly representable in bf16.

    One needle in each block decides its score, at a random place or, in every third block, at the block's last place;
    the other keys are small. Every token and head ranks the blocks in its own order.
    """
    index_q = torch.randn(requests.tokens, heads, dim, generator=rng)
    keys = []
    for _, length in requests.lengths:
        key = 0.05 * torch.randn(length, 1, dim, generator=rng)
        for block, start in enumerate(range(0, length, block_size)):
            size = min(block_size, length - start)
            place = size - 1 if block % 3 == 0 else int(torch.randint(size, (), generator=rng))
            key[start + place] = torch.randn(dim, generator=rng)
        keys.append(_bf16(key))
    return _bf16(index_q), keys


def _bf16(numbers: Tensor) -> Tensor:
    return numbers.to(torch.bfloat16).float()
