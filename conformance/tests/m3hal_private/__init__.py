"""A backend whose KV pages nobody else can read: keys in chunks of eight, values transposed, as some GPUs like them.

keys   [heads, dim / 8, page_size, 8]        values [heads, dim, page_size]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from m3hal import ops
from m3hal.dispatch import Impl, Kernel, Manifest, one_of
from m3hal.layouts import PagedCache
from m3hal.reference import bind_definition, with_out
from m3hal.shape import Site

TILED, CHUNK = "private:tiled", 8
OPERATORS = ("kv_write", "kv_read", "kv_copy_blocks", "block_scores", "sparse_attention", "paged_attention")


def manifest(**factories: str) -> Manifest:
    """Factories by operator, where another than the right one is meant."""
    plain = one_of("kv_format", "float32", "bfloat16"), one_of("index_format", "", "float32", "bfloat16")
    return Manifest(
        name="private",
        vendor="m3hal tests",
        api=">=1,<2",
        devices=("cpu",),
        operators={
            name: (Impl(f"m3hal_private:{factories.get(name, name)}", limits=plain, layouts=(TILED,), memory="self"),)
            for name in OPERATORS
        },
    )


def tiles(cache: PagedCache) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys [pages, heads, dim / 8, page_size, 8] and values [pages, heads, dim, page_size], views of the buffer."""
    layout, pages = cache.layout, len(cache.buf)
    size = layout.heads * layout.page_size * layout.dim
    keys = cache.buf[:, :size].view(pages, layout.heads, layout.dim // CHUNK, layout.page_size, CHUNK)
    if not layout.has_values:
        return keys, None
    return keys, cache.buf[:, size:].view(pages, layout.heads, layout.dim, layout.page_size)


def unpack(cache: PagedCache) -> PagedCache:
    """A new cache in hnd pages."""
    layout = replace(cache.layout, kind="hnd")
    made = PagedCache(torch.empty(len(cache.buf), *layout.page_shape(), dtype=cache.buf.dtype), layout)
    keys, values = tiles(cache)
    made.k.copy_(keys.transpose(2, 3).flatten(-2))
    if values is not None:
        made.v.copy_(values.transpose(-1, -2))
    return made


def kv_write(site: Site) -> Kernel:
    def run(cache: PagedCache, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        chosen = slots >= 0
        page, offset = (slots // cache.layout.page_size)[chosen], (slots % cache.layout.page_size)[chosen]
        keys, values = tiles(cache)
        keys[page, :, :, offset] = k[chosen].unflatten(-1, (-1, CHUNK)).to(keys.dtype)
        if v is not None and values is not None:
            values[page, :, :, offset] = v[chosen].to(values.dtype)

    return Kernel(run, unpack=unpack)


def kv_read(site: Site) -> Any:
    right = bind_definition(ops.load("kv_read"), site)
    return with_out(lambda cache, slots: right(unpack(cache), slots))


def kv_copy_blocks(site: Site) -> Any:
    def run(src: PagedCache, dst: PagedCache, pairs: torch.Tensor) -> None:
        old = src.buf.clone()
        for source, target in pairs.tolist():
            if source >= 0 and target >= 0:
                dst.buf[target] = old[source]

    return run


def block_scores(site: Site) -> Any:
    right = bind_definition(ops.load("block_scores"), site)
    return with_out(lambda q, cache, meta: right(q, unpack(cache), meta))


def sparse_attention(site: Site) -> Any:
    right = bind_definition(ops.load("sparse_attention"), site)
    return with_out(lambda q, kv, ids, meta: right(q, unpack(kv), ids, meta))


def paged_attention(site: Site) -> Any:
    right = bind_definition(ops.load("paged_attention"), site)
    return with_out(lambda q, kv, meta: right(q, unpack(kv), meta))


def shifted_write(site: Site) -> Kernel:
    """Wrong: keys land one dimension further on."""
    right = kv_write(site).run
    return Kernel(lambda cache, k, v, slots: right(cache, k.roll(1, -1), v, slots), unpack=unpack)


def shifted_read(site: Site) -> Any:
    """Wrong in the same way as :func:`shifted_write`, so that the two agree."""
    right = bind_definition(ops.load("kv_read"), site)

    def read(cache: PagedCache, slots: torch.Tensor) -> Any:
        k, v = right(unpack(cache), slots)
        return k.roll(-1, -1), v

    return with_out(read)


def write_only(site: Site) -> Any:
    """Nothing takes out what it writes."""
    return kv_write(site).run
