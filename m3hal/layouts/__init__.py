"""KV-cache page maps as descriptors."""

from m3hal.layouts.paged import KVLayout, PagedCache

__all__ = ["KVLayout", "PagedCache"]
