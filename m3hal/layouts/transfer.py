"""Moves pages between layouts and memories, byte for byte: nothing is rounded again.

``convert`` changes a cache's page map. A ``BlockRow`` puts one block of every cache of a model into one contiguous row:
as the buffer itself (block-outer), or as what a transfer sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from m3hal._lazy import torch
from m3hal.layouts.paged import KVLayout, LayoutKind, PagedCache
from m3hal.layouts.stored import Part, stored

#: bytes; every page of a row starts at a multiple, as vector loads need it
ALIGNMENT = 16


def convert(cache: PagedCache, kind: LayoutKind) -> PagedCache:
    """A new cache with the same codes, scales and global scales in another page map of the format."""
    layout = replace(cache.layout, kind=kind)
    buf = torch.zeros(len(cache.buf), *layout.page_shape(), dtype=cache.buf.dtype, device=cache.buf.device)
    target = replace(cache, buf=buf, layout=layout)
    parts: tuple[Part, ...] = ("k", "v") if layout.has_values else ("k",)
    for part in parts:
        source, goal = stored(cache, part), stored(target, part)
        goal.codes.copy_(source.codes)
        if goal.scales is not None and source.scales is not None:
            goal.scales.copy_(source.scales)
    return target


@dataclass(frozen=True)
class BlockRow:
    """How one block of several caches lies in one row: page after page, in the order of the caches.

    All caches have the same page size. Lengths in bytes.
    """

    layouts: tuple[KVLayout, ...]

    def __post_init__(self) -> None:
        sizes = {layout.page_size for layout in self.layouts}
        if len(sizes) > 1:
            raise ValueError(f"caches of one row need one page size, not {', '.join(map(str, sorted(sizes)))}")

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each cache's page starts in the row."""
        return tuple(accumulate(map(_aligned, self.layouts), initial=0))[:-1]

    @property
    def bytes(self) -> int:
        """Length of a row."""
        return sum(map(_aligned, self.layouts))

    def empty(self, blocks: int, device: torch.device | str = "cpu") -> PagedRows:
        """Rows of undefined contents."""
        return PagedRows(torch.empty(blocks, self.bytes, dtype=torch.uint8, device=device), self)


@dataclass(frozen=True)
class PagedRows:
    """Caches in block-outer memory: buf uint8 [blocks, layout.bytes]. ``kv_copy_blocks`` takes it like a cache."""

    buf: torch.Tensor
    layout: BlockRow

    @property
    def caches(self) -> tuple[PagedCache, ...]:
        """Each cache as a strided view of the rows; global scales, where there are any, are the caller's to add."""
        pages = zip(self.layout.layouts, self.layout.offsets, strict=True)
        return tuple(PagedCache(self._page(layout, offset), layout) for layout, offset in pages)

    def _page(self, layout: KVLayout, offset: int) -> torch.Tensor:
        page = self.buf[:, offset : offset + layout.page_bytes()].view(layout.dtype)
        return page.view(len(page), *layout.page_shape())


def pack(caches: Sequence[PagedCache], blocks: torch.Tensor) -> PagedRows:
    """One row for each of the blocks (int64 [n]), gathered from all caches."""
    rows = BlockRow(tuple(cache.layout for cache in caches)).empty(len(blocks), blocks.device)
    rows.buf.zero_()
    for cache, target in zip(caches, rows.caches, strict=True):
        _bytes_of(target).copy_(_bytes_of(cache)[blocks])
    return rows


def unpack(rows: PagedRows, caches: Sequence[PagedCache], blocks: torch.Tensor) -> None:
    """Writes row i into block ``blocks[i]`` of every cache; the inverse of :func:`pack`."""
    theirs = tuple(cache.layout for cache in caches)
    if theirs != rows.layout.layouts:
        raise ValueError(f"the rows hold pages of {rows.layout.layouts}, the caches are {theirs}; use convert first")
    for source, cache in zip(rows.caches, caches, strict=True):
        _bytes_of(cache)[blocks] = _bytes_of(source)


def _bytes_of(cache: PagedCache) -> torch.Tensor:
    """The buffer in its layout's dtype, so that one label or another of the same bytes is never converted."""
    if cache.buf.element_size() != cache.layout.dtype.itemsize:
        raise ValueError(f"the buffer is {cache.buf.dtype}, but pages of {cache.layout.format} are moved as they are")
    return cache.buf.view(cache.layout.dtype)


def _aligned(layout: KVLayout) -> int:
    return -(-layout.page_bytes() // ALIGNMENT) * ALIGNMENT
