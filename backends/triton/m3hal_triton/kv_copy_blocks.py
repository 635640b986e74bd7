"""``kv_copy_blocks``: whole pages, byte for byte, in every format and page map."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from m3hal.formats import PLAIN_FORMATS
from m3hal.layouts import KVLayout, PagedCache, PagedRows
from m3hal.shape import Site

#: elements of one program
BLOCK = 4096


def kv_copy_blocks(site: Site) -> object:
    """The callable, the same for every site."""
    return _copy


def _copy(src: PagedCache | PagedRows, dst: PagedCache | PagedRows, pairs: torch.Tensor, out: None = None) -> None:
    if src.layout != dst.layout:
        raise ValueError(
            f"pages are copied byte for byte, so both caches need one layout, not {src.layout} and {dst.layout}; "
            "use m3hal.layouts.convert for another page map, kv_read and kv_write for another format"
        )
    count = pairs.shape[0]
    if not count:
        return
    source, target = _memory(src), _memory(dst)
    if source.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
        _launch(source, target, pairs, True, True)
        return
    # every page is read before any is written
    between = torch.empty(count, *source.shape[1:], dtype=source.dtype, device=source.device)
    _launch(source, between, pairs, True, False)
    _launch(between, target, pairs, False, True)


def _memory(cache: PagedCache | PagedRows) -> torch.Tensor:
    plain = isinstance(cache.layout, KVLayout) and cache.layout.format in PLAIN_FORMATS
    return cache.buf if plain or cache.buf.dtype == torch.uint8 else cache.buf.view(torch.uint8)


def _launch(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, take: bool, put: bool) -> None:
    """Copies page ``pairs[i, 0]``, or i unless ``take``, to page ``pairs[i, 1]``, or i unless ``put``."""
    size = source[0].numel()
    flat = source[0].is_contiguous() and target[0].is_contiguous()
    shape = (1, 1, size) if flat else (1,) * (4 - source.ndim) + tuple(source.shape[1:])
    strides = [(t.stride(0), *((0, 0, 1) if flat else (0,) * (4 - t.ndim) + t.stride()[1:])) for t in (source, target)]
    _pages[(pairs.shape[0], triton.cdiv(size, BLOCK))](
        source, target, pairs, pairs.stride(), *strides, shape[1:], size, BLOCK=BLOCK, TAKE=take, PUT=put, FLAT=flat
    )


@triton.jit
def _pages(
    source, target, pairs, pair, source_strides, target_strides, shape, size,
    BLOCK: tl.constexpr, TAKE: tl.constexpr, PUT: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """shape: of the last two axes of a page. Strides: of the page, and of its three axes."""
    row = tl.program_id(0).to(tl.int64)
    taken = tl.load(pairs + row * pair[0]).to(tl.int64)
    filled = tl.load(pairs + row * pair[0] + pair[1]).to(tl.int64)
    if (taken < 0) | (filled < 0):
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = element < size
    at = source + (taken if TAKE else row) * source_strides[0]
    to = target + (filled if PUT else row) * target_strides[0]
    if FLAT:
        tl.store(to + element, tl.load(at + element, mask=there), mask=there)
    else:
        outer, rest = element // (shape[0] * shape[1]), element % (shape[0] * shape[1])
        middle, inner = (rest // shape[1]).to(tl.int64), (rest % shape[1]).to(tl.int64)
        outer = outer.to(tl.int64)
        at += outer * source_strides[1] + middle * source_strides[2] + inner * source_strides[3]
        to += outer * target_strides[1] + middle * target_strides[2] + inner * target_strides[3]
        tl.store(to, tl.load(at, mask=there), mask=there)
