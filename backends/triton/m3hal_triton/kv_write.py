"""``kv_write``: tokens into a paged cache, rounded once to its format."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.layouts import PagedCache
from m3hal.shape import Site
from m3hal_triton import _encode, _pages
from m3hal_triton._launch import converts
from m3hal_triton._rows import items

#: vectors of one program
ROWS = 16


def kv_write(site: Site) -> partial[None]:
    """The callable for a site; it serves the main and the index cache."""
    return partial(_write, site)


def _write(
    site: Site, cache: PagedCache, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor, out: None = None
) -> None:
    layout = cache.layout
    if layout.has_values != (v is not None):
        raise ValueError("pass v for a main cache, and None for an index cache, which holds keys only")
    if not k.numel():
        return
    source = k if v is None else v
    _vectors[(triton.cdiv(k.shape[0] * layout.heads, ROWS),)](
        _pages.memory(cache), _pages.keys(cache), _pages.values(cache), cache.k_scale, cache.v_scale,
        k, source, slots, k.stride(), source.stride(), slots.stride(0), k.shape[0],
        HEADS=layout.heads,
        ROWS=ROWS,
        DIM=layout.dim,
        PADDED=triton.next_power_of_2(layout.dim),
        PAGE=layout.page_size,
        FORMAT=layout.format,
        VALUES=v is not None,
        NATIVE=converts(cache.buf.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _vectors(
    cache, keys, values, k_scale, v_scale, k, v, slots, k_strides, v_strides, slot_stride, tokens,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, FORMAT: tl.constexpr, VALUES: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    token, head, real = items(tl.program_id(0), 0, tokens, HEADS, ROWS)
    slot = tl.load(slots + token * slot_stride, mask=real, other=-1).to(tl.int64)
    dim = tl.arange(0, PADDED)[None, :]
    there = real & (dim < DIM)
    x = tl.load(k + token * k_strides[0] + head * k_strides[1] + dim * k_strides[2], mask=there)
    scale = _encode.loaded(k_scale)
    if VALUES:
        y = tl.load(v + token * v_strides[0] + head * v_strides[1] + dim * v_strides[2], mask=there)
        by = _encode.divisor(_encode.loaded(v_scale), FORMAT, NATIVE)
        _encode.put((y,), 0, slot >= 0, cache, values, slot, head, by, DIM, PAGE, FORMAT, True, NATIVE)
    by = _encode.divisor(scale, FORMAT, NATIVE)
    _encode.put((x,), 0, slot >= 0, cache, keys, slot, head, by, DIM, PAGE, FORMAT, False, NATIVE)
