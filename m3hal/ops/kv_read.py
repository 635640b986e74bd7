"""Reads tokens back out of a paged cache, dequantised: the oracle's view of any layout.

    k[i], v[i] = cache[page = slots[i] // page_size, offset = slots[i] % page_size]

Source: vLLM ``reshape_and_cache``'s inverse; the layouts of :mod:`m3hal.layouts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m3hal._lazy import torch
from m3hal.formats import dequantize
from m3hal.layouts import PagedCache
from m3hal.layouts.stored import Part, stored
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._traits import EXACT


def kv_read(cache: PagedCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values of the given slots.

    Args:
        cache: a main cache, or an index cache (keys only).
        slots: int64 [n]; slot = page * page_size + offset. A negative slot reads zeros.

    Returns:
        k [n, H, D] and v [n, H, D] (None for an index cache), fp32, ``code * scale * global``;
        fp64 for fp64 caches.
    """
    page, offset = slots.clamp(min=0) // cache.layout.page_size, slots.clamp(min=0) % cache.layout.page_size
    absent = (slots < 0)[:, None, None]

    def take(part: Part) -> torch.Tensor:
        return dequantize(stored(cache, part).take(page, offset)).masked_fill(absent, 0.0)

    return take("k"), take("v") if cache.layout.has_values else None


def read_sequence(
    cache: PagedCache, block_table: torch.Tensor, seq_len: int, traits: Mapping[str, str] = EXACT
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``seq_len`` tokens of one request as k and v [H, S, D]; for the references of other operators.

    Follows only the entries of ``block_table`` that hold tokens. An index cache returns its keys twice.
    traits: may hold ``kv_dequant_round``.
    """
    product: Any = traits.get("kv_dequant_round", "exact")
    pages = block_table[: -(-seq_len // cache.layout.page_size)].long()

    def take(part: Part) -> torch.Tensor:
        return dequantize(stored(cache, part).take_pages(pages), product=product)[:, :seq_len]

    k = take("k")
    return k, take("v") if cache.layout.has_values else k


def fake(cache: PagedCache, slots: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Empty fp32 [n, H, D] twice, or once and None for an index cache."""
    shape = (slots.shape[0], cache.layout.heads, cache.layout.dim)
    k = torch.empty(shape, dtype=torch.float32, device=slots.device)
    return k, torch.empty_like(k) if cache.layout.has_values else None


OPERATOR = Operator(
    name="kv_read",
    kind="core",
    reference=kv_read,
    fake=fake,
    numeric=Numeric("X"),
    sites=("dense_attention", "sparse_attention", "drafter"),
    group="cache",
    source="m3hal layouts; vLLM reshape_and_cache",
)
