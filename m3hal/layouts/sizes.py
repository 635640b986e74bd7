"""The caches of a whole model on one rank, and what a token costs in them. Needs no torch."""

from __future__ import annotations

from m3hal.layouts.paged import KVLayout, page_map
from m3hal.shape import ModelShape


def main_caches(shape: ModelShape, layout: str = "") -> tuple[KVLayout, ...]:
    """One cache of keys and values for each layer. layout: of a plan, see :func:`~m3hal.layouts.page_map`."""
    kind = page_map(shape.kv_format, layout)
    cache = KVLayout(kind, shape.kv_format, shape.page_size, shape.num_kv_heads, shape.head_dim, has_values=True)
    return (cache,) * shape.num_layers


def index_caches(shape: ModelShape, layout: str = "") -> tuple[KVLayout, ...]:
    """One cache of index keys for each sparse layer. All heads share the key, so every rank holds all of it."""
    kind = page_map(shape.index_format, layout)
    cache = KVLayout(kind, shape.index_format, shape.page_size, 1, shape.index_dim, has_values=False)
    return (cache,) * (shape.num_layers - shape.num_dense_attention_layers)


def bytes_per_token(caches: tuple[KVLayout, ...]) -> int:
    """Bytes of one token in all of the caches."""
    return sum(layout.bytes_per_token() for layout in caches)
