"""Where a cache's codes and scales lie, as numbers that a kernel takes: every page map is a set of strides."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Tiles
from triton.tools.tensor_descriptor import TensorDescriptor

from m3hal.formats import PLAIN_FORMATS
from m3hal.layouts import KVLayout, PagedCache


class Part(NamedTuple):
    """The keys, or the values, of a cache. All in elements of :func:`memory`, so bytes unless the format is plain.

    Code i of a token is at ``codes + page * page_stride + head * head + offset * token + i * column``. Block scale g is
    at ``scales + page * page_stride + head * scale_head + offset // 4 * 4 * groups`` plus ``offset % 4 * groups + g``
    for keys, and ``g * 4 + offset % 4`` for values.
    """

    codes: int
    page: int
    head: int
    token: int
    column: int
    scales: int = 0
    scale_head: int = 0


def memory(cache: PagedCache) -> torch.Tensor:
    """The buffer as kernels see it: a plain format's numbers, or uint8 whatever the bytes are labelled."""
    plain = cache.layout.format in PLAIN_FORMATS
    return cache.buf if plain or cache.buf.dtype == torch.uint8 else cache.buf.view(torch.uint8)


def keys(cache: PagedCache) -> Part:
    """Of the cache's keys. Raises ValueError for a page map that the buffer's strides don't allow."""
    return _of(cache)[0]


def values(cache: PagedCache) -> Part:
    """Of the cache's values; of the keys where it holds no values, as a stand-in that nothing reads."""
    return _of(cache)[-1]


def rows(cache: PagedCache, count: int) -> TensorDescriptor:
    """The keys of a cache of one head, a key a row, for the unit that copies tiles of ``count`` rows; kept, too.

    A page's rows are neighbours, and pages a whole number of rows apart.
    """
    kept: TensorDescriptor | None = vars(cache).get("_triton_rows")
    if kept is None or kept.block_shape[0] != count:
        kept = TensorDescriptor(cache.buf, *_shape_of_rows(cache), [count, cache.layout.dim])
        vars(cache)["_triton_rows"] = kept
    return kept


def tiles(cache: PagedCache) -> Tiles:
    """The same of a bf16 cache for a kernel in Gluon, 128 rows in the order that the matrix unit reads; kept, too."""
    kept: Tiles | None = vars(cache).get("_triton_tiles")
    if kept is None:
        order = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        kept = Tiles(cache.buf, *_shape_of_rows(cache), [128, cache.layout.dim], order)
        vars(cache)["_triton_tiles"] = kept
    return kept


def are_pairs(cache: PagedCache) -> bool:
    """Whether a token's key and value of a head are parts of one row, and pages and heads whole rows apart."""
    k, v = _of(cache)[0], _of(cache)[-1]
    apart = k.page % k.token == 0 and k.head % k.token == 0 and k.token % 8 == 0
    return apart and k.column == 1 and k[1:5] == v[1:5] and max(k.codes, v.codes) + cache.layout.dim <= k.token


def pairs(cache: PagedCache) -> Tiles:
    """A bf16 cache as such rows, in tiles of 64 keys or values for a kernel in Gluon; kept, too."""
    kept: Tiles | None = vars(cache).get("_triton_pairs")
    if kept is None:
        part, layout = keys(cache), cache.layout
        page, head = part.page // part.token, part.head // part.token
        last = (cache.buf.shape[0] - 1) * page + (layout.heads - 1) * head + layout.page_size
        order = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        shape = [last, max(part.codes, values(cache).codes) + layout.dim]
        kept = Tiles(cache.buf, shape, [part.token, 1], [64, layout.dim], order)
        vars(cache)["_triton_pairs"] = kept
    return kept


def _shape_of_rows(cache: PagedCache) -> tuple[list[int], list[int]]:
    """How many rows of how many numbers the keys of a cache of one head are, and their strides."""
    part, layout = keys(cache), cache.layout
    last = (cache.buf.shape[0] - 1) * (part.page // part.token) + layout.page_size
    return [last, layout.dim], [part.token, 1]


def _of(cache: PagedCache) -> tuple[Part, ...]:
    """Kept with the cache, which is frozen: hashing a layout takes longer than all else of a launch."""
    kept: tuple[Part, ...] | None = vars(cache).get("_triton_parts")
    if kept is None:
        kept = vars(cache)["_triton_parts"] = _parts(cache.layout, cache.buf.stride())
    return kept


@cache
def _parts(layout: KVLayout, strides: tuple[int, ...]) -> tuple[Part, ...]:
    if layout.kind in ("hnd", "nhd"):
        page, first, second, column = strides
        head, token = (first, second) if layout.kind == "hnd" else (second, first)
        return tuple(Part(i * layout.dim * column, page, head, token, column) for i in range(layout.parts))
    token, groups = layout.spec.data_bytes(layout.dim), layout.spec.scale_bytes(layout.dim)
    codes, scales = layout.page_size * token, layout.page_size * groups
    if layout.kind == "planar":
        _dense(layout, strides[1:], (1,))
        starts = [i * layout.heads * (codes + scales) for i in range(layout.parts)]
        return tuple(Part(start, strides[0], codes, token, 1, start + layout.heads * codes, scales) for start in starts)
    page, slot = strides[:2]
    _dense(layout, strides[2:], (token + groups, 1))
    head = layout.parts * slot
    return tuple(Part(i * slot, page, head, token, 1, i * slot + codes, head) for i in range(layout.parts))


def _dense(layout: KVLayout, strides: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if strides != wanted:
        raise ValueError(
            f"a slot of msa_slot and a page of planar are contiguous; this {layout.kind} buffer has strides "
            f"{strides} inside where {wanted} are needed"
        )
