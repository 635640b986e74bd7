"""``kv_write``: tokens into a paged cache of the activations' dtype."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from m3hal.layouts import PagedCache
from m3hal.shape import Site


def kv_write(site: Site) -> partial[None]:
    """The callable for a site; it serves the main and the index cache."""
    return partial(_write, site)


def _write(
    site: Site, cache: PagedCache, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor, out: None = None
) -> None:
    if cache.layout.has_values != (v is not None):
        raise ValueError("pass v for a main cache, and None for an index cache, which holds keys only")
    if not k.numel():
        return
    keys, values = cache.k, cache.v if v is not None else cache.k
    source = k if v is None else v
    _tokens[(k.shape[0],)](
        keys, values, k, source, slots,
        *keys.stride(), *values.stride(), *k.stride(), *source.stride(), slots.stride(0),
        cache.layout.heads, cache.layout.dim,
        PAGE=cache.layout.page_size,
        HEADS=triton.next_power_of_2(cache.layout.heads),
        DIM=triton.next_power_of_2(cache.layout.dim),
        VALUES=v is not None,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _tokens(
    keys,
    values,
    k,
    v,
    slots,
    keys_page,
    keys_head,
    keys_slot,
    keys_dim,
    values_page,
    values_head,
    values_slot,
    values_dim,
    k_token,
    k_head,
    k_dim,
    v_token,
    v_head,
    v_dim,
    slot_stride,
    heads,
    dims,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    if slot < 0:
        return
    page, offset = slot // PAGE, slot % PAGE
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    real = (head < heads) & (dim < dims)
    value = tl.load(k + token * k_token + head * k_head + dim * k_dim, mask=real)
    to = keys + page * keys_page + head * keys_head + offset * keys_slot + dim * keys_dim
    tl.store(to, value.to(keys.dtype.element_ty), mask=real)
    if VALUES:
        value = tl.load(v + token * v_token + head * v_head + dim * v_dim, mask=real)
        to = values + page * values_page + head * values_head + offset * values_slot + dim * values_dim
        tl.store(to, value.to(values.dtype.element_ty), mask=real)
