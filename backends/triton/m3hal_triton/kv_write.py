"""``kv_write``: tokens into a paged cache, rounded once to its format."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.layouts import PagedCache
from m3hal.shape import Site
from m3hal_triton import _encode, _pages


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
    _tokens[(k.shape[0],)](
        _pages.memory(cache), _pages.keys(cache), _pages.values(cache), cache.k_scale, cache.v_scale,
        k, source, slots, k.stride(), source.stride(), slots.stride(0),
        HEADS=layout.heads,
        PADDED_HEADS=triton.next_power_of_2(layout.heads),
        DIM=layout.dim,
        PADDED_DIM=triton.next_power_of_2(layout.dim),
        PAGE=layout.page_size,
        FORMAT=layout.format,
        VALUES=v is not None,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _tokens(
    cache,
    keys,
    values,
    k_scale,
    v_scale,
    k,
    v,
    slots,
    k_strides,
    v_strides,
    slot_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    VALUES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    if slot < 0:
        return
    head, dim = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED_DIM)[None, :]
    real = head < HEADS
    x = tl.load(k + token * k_strides[0] + head * k_strides[1] + dim * k_strides[2], mask=real & (dim < DIM))
    _encode.put(x, real, cache, keys, slot, head, k_scale, 0, DIM, PAGE, FORMAT, False)
    if VALUES:
        x = tl.load(v + token * v_strides[0] + head * v_strides[1] + dim * v_strides[2], mask=real & (dim < DIM))
        _encode.put(x, real, cache, values, slot, head, v_scale, 0, DIM, PAGE, FORMAT, True)
