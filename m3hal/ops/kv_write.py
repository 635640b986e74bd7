"""Writes tokens into a paged cache, rounding once to its format.

    cache[page = slots[i] // page_size, offset = slots[i] % page_size] = k[i], v[i]

Source: vLLM ``reshape_and_cache``; the layouts of :mod:`m3hal.layouts`.
"""

from __future__ import annotations

from collections.abc import Mapping

from m3hal._lazy import torch
from m3hal.layouts import PagedCache
from m3hal.layouts.stored import Stored, quantize_like, stored
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._traits import DOUBLE_ROUNDING, EXACT, KV_SCALE_USED, MX_SCALE_RULE, NVFP4_QUANTIZER


def kv_write(
    cache: PagedCache,
    k: torch.Tensor,
    v: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    traits: Mapping[str, str] = EXACT,
) -> None:
    """Stores keys and values at the given slots; every other byte of the cache stays as it is.

    Args:
        cache: written in place.
        k: [T, H, D].
        v: [T, H, D], or None for an index cache.
        slots: int64 [T]; slot = page * page_size + offset. A negative slot writes nothing. No slot may come twice.
    """
    if cache.layout.has_values != (v is not None):
        raise ValueError("pass v for a main cache, and None for an index cache, which holds keys only")
    kept = slots >= 0
    page, offset = slots[kept] // cache.layout.page_size, slots[kept] % cache.layout.page_size
    _put(stored(cache, "k"), page, offset, k[kept], traits)
    if v is not None:
        _put(stored(cache, "v"), page, offset, v[kept], traits)


def _put(
    part: Stored, page: torch.Tensor, offset: torch.Tensor, vectors: torch.Tensor, traits: Mapping[str, str]
) -> None:
    if traits.get("double_rounding") == "bfloat16":
        vectors = vectors.to(torch.bfloat16)
    part.put(page, offset, quantize_like(part, vectors, traits))


def fake(cache: PagedCache, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor, **_: object) -> None:
    """No output."""


OPERATOR = Operator(
    name="kv_write",
    kind="core",
    reference=kv_write,
    fake=fake,
    numeric=Numeric("X", "every byte; NVFP4 by reciprocals within last places of fp32"),
    sites=("dense_attention", "sparse_attention", "drafter"),
    group="cache",
    mutates=("cache",),
    traits=(KV_SCALE_USED, NVFP4_QUANTIZER, MX_SCALE_RULE, DOUBLE_ROUNDING),
    source="vLLM reshape_and_cache",
)
