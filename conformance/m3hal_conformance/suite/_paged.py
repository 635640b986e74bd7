"""Paged inputs: requests in shuffled pages, caches whose every other byte is stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal.formats import PLAIN_FORMATS
from m3hal.layouts import KVLayout, PagedCache, page_map
from m3hal.ops import SeqMeta
from m3hal.ops.kv_write import kv_write
from m3hal_conformance.bounds import bits
from m3hal_conformance.case import Rng, Site, dtype_of
from m3hal_conformance.inputs import AttentionInputs, Batch, attention_inputs, batch

Lengths = Sequence[tuple[int, int]]


def requests(rng: Rng, lengths: Lengths, page: int, *, max_k: int = 0) -> Batch:
    """Requests of (query tokens, tokens in all), in pages that the rng's ``pages`` knob shuffles."""
    return batch(lengths, page, rng.page_generator, max_k=max_k)


def kv_layout(site: Site, kind: str = "hnd") -> KVLayout:
    """The main cache's, where a plan names the layout ``kind``."""
    found = page_map(site.kv_format, kind)
    return KVLayout(found, site.kv_format, site.page_size, site.num_kv_heads, site.head_dim, has_values=True)


def index_layout(site: Site, kind: str = "hnd") -> KVLayout:
    """The index cache's, where a plan names the layout ``kind``: bf16 index keys beside msa_slot pages lie in hnd."""
    found = page_map(site.index_format, kind)
    return KVLayout(found, site.index_format, site.page_size, 1, site.index_dim, has_values=False)


def filled(
    held: Batch, layout: KVLayout, keys: Sequence[Tensor], values: Sequence[Tensor] | None, rng: Rng, outer: int = 1
) -> PagedCache:
    """A cache with the requests' keys and values [S, H, D]; every other byte is the rng's ``stale``.

    outer: > 1 takes every ``outer``-th page of a larger buffer, as a block-outer cache of several layers does.
    """
    cache = empty(layout, held.pages, rng, outer)
    for request, (_, length) in enumerate(held.lengths):
        if length:
            kv_write(cache, keys[request], None if values is None else values[request], held.slots(request))
    return cache


#: global scales of quantised keys and values, no powers of two; a part that takes the other's is found out
SCALES = (0.37, 1.9)


def empty(layout: KVLayout, pages: int, rng: Rng, outer: int = 1) -> PagedCache:
    """A cache that holds nothing but stale bytes."""
    cache = layout.empty(pages * outer)
    if layout.format not in PLAIN_FORMATS:  # NaN scales, or the smallest or largest numbers of either sign
        byte = 0xFF if rng.stale != rng.stale else 0x00 if rng.stale == 0 else 0x7E if rng.stale > 0 else 0xFE
        cache.buf.fill_(byte)
        if layout.has_values:
            cache = replace(cache, k_scale=torch.tensor(SCALES[0]), v_scale=torch.tensor(SCALES[1]))
    elif rng.stale == rng.stale:
        cache.buf.fill_(rng.stale)
    else:
        bits(cache.buf).fill_(-1)
    return replace(cache, buf=cache.buf[outer - 1 :: outer]) if outer > 1 else cache


def apart(cache: PagedCache) -> PagedCache:
    """The same bytes, further apart: rows of hnd and nhd, slots of msa_slot, pages of planar, with other bytes between.

    Every stride but the innermost differs from a contiguous cache's, and the first byte lies at an offset.
    """
    kind, buf = cache.layout.kind, cache.buf
    if kind in ("hnd", "nhd"):
        wide = torch.empty(*buf.shape[:-1], 32 + buf.shape[-1], dtype=buf.dtype)
        bits(wide).fill_(0x7F if buf.element_size() == 1 else -1)
        view = wide[..., 16 : 16 + buf.shape[-1]]
    else:
        axis = 1 if kind == "msa_slot" else 0
        wide = torch.full((*buf.shape[:axis], 2 * buf.shape[axis], *buf.shape[axis + 1 :]), 0x7F, dtype=buf.dtype)
        view = wide.unflatten(axis, (-1, 2)).select(axis + 1, 1)  # type: ignore[no-untyped-call]
    view.copy_(buf)
    return replace(cache, buf=view)


def block_inputs(rng: Rng, site: Site, held: Batch) -> AttentionInputs:
    """The primitives' attention inputs in the site's dtype; in fp32 with bits that bf16 does not have."""
    found = attention_inputs(
        held, site.num_q_heads, site.num_kv_heads, site.head_dim, max(site.block_size, 128), rng.generator
    )
    found.q[held.meta.positions(held.tokens) < 0] = float("nan")  # what padded rows hold after a padded layer
    if site.dtype != "float32":
        return replace(found, q=found.q.to(dtype_of(site)))
    fine = [[t * (1 + 1e-3 * rng.normal(*t.shape)) for t in part] for part in ([found.q], found.keys, found.values)]
    return AttentionInputs(fine[0][0], fine[1], fine[2])


def positions_of(held: Batch) -> Tensor:
    """int64 [tokens]: position of each query token, 0 in a padded request."""
    return held.meta.positions(held.tokens).clamp(min=0)


def with_strays(inputs: dict[str, Any], count: int = 3) -> dict[str, Any]:
    """The inputs with ``count`` tokens at the end that belong to no request, as a captured graph's padding does."""

    def grown(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        fill = torch.full(
            (count, *value.shape[1:]), float("nan") if value.is_floating_point() else 0, dtype=value.dtype
        )
        return torch.cat([value, fill])

    return {name: grown(value) for name, value in inputs.items()}


def in_huge_cache(cache: PagedCache, meta: SeqMeta, *, beyond: int = 2**31) -> tuple[PagedCache, SeqMeta]:
    """The same pages at the two ends of a buffer whose last pages start past 31 bits; the middle is never touched."""
    per_page = cache.buf[0].numel()
    bad, used = beyond // per_page, len(cache.buf)
    place = torch.tensor([page if page % 2 else bad - 1 + page for page in range(used)])
    buf = torch.empty(bad + used, *cache.buf.shape[1:], dtype=cache.buf.dtype)
    for page in range(used):
        bits(buf)[place[page]] = bits(cache.buf)[page]
    table = place[meta.block_table.long()].to(meta.block_table.dtype)
    return replace(cache, buf=buf), replace(meta, block_table=table)


def choose(rng: Rng, held: Batch, site: Site, *, count: int = 0) -> Tensor:
    """int32 [T, Hkv, k]: for each token and kv head its own block and random others, ascending, -1 in the tail.

    count: blocks besides the newest; 0: all that fit.
    """
    position = held.meta.positions(held.tokens)
    ids = torch.full((held.tokens, site.num_kv_heads, site.top_k_blocks), -1, dtype=torch.int32)
    for token in range(held.tokens):
        newest = int(position[token]) // site.block_size
        if int(position[token]) < 0:
            ids[token, :, :2] = torch.tensor([0, 1])  # a padded row may say anything
            continue
        for group in range(site.num_kv_heads):
            others = rng.permutation(newest)[: (count or site.top_k_blocks) - (0 if count else 1)]
            chosen = torch.cat([others, torch.tensor([newest])]).sort().values[: site.top_k_blocks]
            ids[token, group, : len(chosen)] = chosen.int()
    return ids
