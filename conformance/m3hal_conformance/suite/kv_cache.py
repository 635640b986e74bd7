"""``kv_write``, ``kv_read``, ``kv_copy_blocks``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from m3hal.layouts import KVLayout, PagedCache
from m3hal_conformance.case import Case, Inputs, MakeIn, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask, every_other
from m3hal_conformance.suite._paged import empty, index_layout, kv_layout

BOTH = ("hnd", "nhd")
P = 128
#: slots around page boundaries, out of order, with rows that write nothing
SLOTS = [127, 128, 0, -1, 3 * P + 5, 2 * P - 1, -1, 4 * P, 1, 5 * P + 126]
DECODED = ("bytes_decoded", "permuted_rows")


def _write(slots: list[int], *, index: bool = False, outer: int = 1, pages: int = 6) -> MakeIn:
    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        layout = index_layout(site, kind) if index else kv_layout(site, kind)
        shape = (len(slots), layout.heads, layout.dim)
        return {
            "cache": _numbered(empty(layout, pages, rng, outer)),
            "k": rng.normal(*shape).to(dtype_of(site)),
            "v": None if index else rng.normal(*shape).to(dtype_of(site)),
            "slots": torch.tensor(slots, dtype=torch.int64),
        }

    return make


def _numbered(cache: PagedCache) -> PagedCache:
    """Each old element has a number of its own, exact in bf16, so that every byte which changes shows."""
    codes = (torch.arange(251) - 125).to(cache.buf.dtype)
    cache.buf.copy_(codes.repeat(-(-cache.buf.numel() // 251))[: cache.buf.numel()].view(cache.buf.shape))
    return cache


def _fused_row(rng: Rng, site: Site, kind: str) -> Inputs:
    """k and v as slices of the projection's row."""
    inputs = _write(SLOTS)(rng, site, kind)
    heads, dim = site.num_kv_heads, site.head_dim
    row = torch.full((len(SLOTS), 3 * heads * dim + 64), float("nan"), dtype=dtype_of(site))
    row[:, 64 : 64 + heads * dim] = inputs["k"].flatten(1)
    row[:, 64 + 2 * heads * dim :] = inputs["v"].flatten(1)
    return {
        **inputs,
        "k": row[:, 64 : 64 + heads * dim].view(-1, heads, dim),
        "v": row[:, 64 + 2 * heads * dim :].view(-1, heads, dim),
    }


def _odd_values(rng: Rng, site: Site, kind: str) -> Inputs:
    """-0, NaN, infinities and ties of bf16 rounding are stored like any other number."""
    inputs = _write(SLOTS)(rng, site, kind)
    odd = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), float("-inf"), 1 + 2**-8, 1 + 3 * 2**-8, 1e-40])
    for name in ("k", "v"):
        inputs[name][..., :8] = odd.to(dtype_of(site))
    return inputs


def _strided_view(rng: Rng, site: Site, kind: str) -> Inputs:
    """The cache is a slice of wider tokens: page, head and token strides all differ from a contiguous cache's."""
    inputs = _write(SLOTS)(rng, site, kind)
    layout: KVLayout = inputs["cache"].layout
    wide = torch.full((6, *layout.page_shape()[:2], layout.width + 32), 7.0, dtype=inputs["cache"].buf.dtype)
    return {**inputs, "cache": _numbered(replace(inputs["cache"], buf=wide[..., 8 : 8 + layout.width]))}


def _both(
    op: str, name: str, make: Any, *, kind: str = "sparse_attention", layouts: Any = BOTH, **options: Any
) -> list[Case]:
    """The same question in both page maps: ``make`` also takes the layout's kind."""
    cases: list[Case] = []
    options = {"tensor_parallel": 2, **options}
    for layout in layouts:
        bound = lambda rng, site, make=make, layout=layout: make(rng, site, layout)  # noqa: E731
        cases += ask(op, name, bound, kind=kind, layouts=(layout,), **options)
    return cases


def _huge(index: bool) -> MakeIn:
    """Pages on both sides of the first whose offset leaves 31 bits; memory that nobody touches costs nothing."""

    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        layout = index_layout(site, kind) if index else kv_layout(site, kind)
        per_page = layout.page_size * layout.heads * layout.width
        bad = 2**31 // per_page
        cache = PagedCache(torch.empty(bad + 2, *layout.page_shape(), dtype=dtype_of(site)), layout)
        slots = torch.tensor([0, bad - 1, bad, bad + 1]) * layout.page_size + torch.tensor([3, 127, 0, 5])
        shape = (4, layout.heads, layout.dim)
        v = None if index else rng.normal(*shape).to(dtype_of(site))
        return {"cache": cache, "k": rng.normal(*shape).to(dtype_of(site)), "v": v, "slots": slots}

    return make


def _kv_write() -> list[Case]:
    op = "kv_write"
    return [
        *_both(op, "page_boundaries", _write(SLOTS), also=DECODED, quick=True, bugs=("F60", "F64")),
        *_both(op, "tp4", _write(SLOTS), tensor_parallel=4, also=("bytes_decoded",), bugs=("F67",)),
        *_both(op, "four_heads", _write(SLOTS), tensor_parallel=1, also=("bytes_decoded",), bugs=("F60",)),
        *_both(op, "index_keys", _write(SLOTS, index=True), also=("bytes_decoded",), quick=True, bugs=("F24",)),
        *_both(op, "fused_row", _fused_row, also=("bytes_decoded",), quick=True, bugs=("F65",)),
        *_both(op, "odd_values", _odd_values, quick=True, bugs=("F56",)),
        *_both(op, "block_outer", _write(SLOTS, outer=3), quick=True, bugs=("F64",)),
        *_both(op, "strided_view", _strided_view, quick=True, bugs=("F64",)),
        *_both(op, "tokens_200", _write([(7 * n + 3) % (6 * P) if n % 9 else -1 for n in range(200)]), quick=True,
               tensor_parallel=4, bugs=("F68",)),
        *_both(op, "all_padded", _write([-1, -1, -1]), quick=True, bugs=("F29",)),
        *_both(op, "no_token", _write([]), bugs=("F30",), quick=True),
        *_both(op, "tokens_equal_heads", _write([130, 5, -1, 260])),
        *_both(op, "rounds_once", _write(SLOTS), dtypes=("float32",), kv_format="bfloat16", quick=True, bugs=("F73",)),
        *_both(op, "page_16", _write([15, 16, 0, 40, -1]), page_size=16, bugs=("F25",)),
        *_both(op, "beyond_31_bits", _huge(False), dtypes=("bfloat16",), layouts=("hnd",), checks=("huge_pages",),
               lazy=("cache",), bugs=("F63",)),
        *_both(op, "beyond_31_bits_index", _huge(True), dtypes=("bfloat16",), layouts=("hnd",), checks=("huge_pages",),
               lazy=("cache",), bugs=("F63",)),
    ]  # fmt: skip


def _read(slots: list[int], *, index: bool = False, outer: int = 1) -> MakeIn:
    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        inputs = _write([s for s in slots if s >= 0], index=index, outer=outer)(rng, site, kind)
        cache, written = empty(inputs["cache"].layout, 6, rng, outer), torch.tensor([s for s in slots if s >= 0]).long()
        page, offset = written // cache.layout.page_size, written % cache.layout.page_size
        cache.k[page, :, offset] = inputs["k"].to(cache.buf.dtype)
        if not index:
            cache.v[page, :, offset] = inputs["v"].to(cache.buf.dtype)
        return {"cache": cache, "slots": torch.tensor(slots, dtype=torch.int64)}

    return make


def _kv_read() -> list[Case]:
    op = "kv_read"
    return [
        *_both(op, "page_boundaries", _read(SLOTS), also=("stale", "permuted_rows"), quick=True, bugs=("F60",)),
        *_both(op, "index_keys", _read(SLOTS, index=True), quick=True, bugs=("F24",)),
        *_both(op, "block_outer", _read(SLOTS, outer=3), quick=True, bugs=("F64",)),
        *_both(
            op,
            "tokens_200",
            _read([(7 * n + 3) % (6 * P) if n % 9 else -1 for n in range(200)]),
            quick=True,
            tensor_parallel=4,
            bugs=("F68",),
        ),
        *_both(op, "twice_the_same", _read([9, 9, 300, -1, 300])),
        *_both(op, "all_absent", _read([-1, -5, -1]), bugs=("F13",), quick=True),
        *_both(op, "no_token", _read([]), bugs=("F30",), quick=True),
    ]


def _copy(pairs: list[tuple[int, int]], *, inside: bool = False, outer: int = 1, index: bool = False) -> MakeIn:
    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        layout = index_layout(site, kind) if index else kv_layout(site, kind)
        src = _numbered(empty(layout, 6, rng))
        src.buf.add_(torch.arange(6).view(-1, 1, 1, 1).to(src.buf.dtype))
        src.buf[3, 0, 0, :4] = torch.tensor([float("nan"), -0.0, float("inf"), 1.0])
        dst = src if inside else empty(layout, 7, rng, outer)
        return {"src": src, "dst": dst, "pairs": torch.tensor(pairs, dtype=torch.int64).view(-1, 2)}

    return make


def _kv_copy() -> list[Case]:
    op, some = "kv_copy_blocks", [(3, 0), (0, 6), (-1, 2), (5, 5), (2, -1), (0, 1)]
    return [
        *_both(op, "some_pages", _copy(some), quick=True, bugs=("F24",)),
        *_both(op, "index_pages", _copy(some, index=True), quick=True, bugs=("F24",)),
        *_both(op, "swap_within_one_cache", _copy([(1, 4), (4, 1), (2, 3)], inside=True), checks=LIGHT, quick=True),
        *_both(op, "into_block_outer", _copy(some, outer=2), quick=True, bugs=("F64",)),
        *_both(op, "no_pair", _copy([]), bugs=("F30",), quick=True),
        *_both(op, "one_pair", _copy([(5, 2)])),
        *_both(op, "strided_pairs", lambda r, s, k: {**_copy(some)(r, s, k), "pairs": every_other(_copy(some)(r, s,
           k)["pairs"], 0)}),
    ]  # fmt: skip


CASES = [*_kv_write(), *_kv_read(), *_kv_copy()]
