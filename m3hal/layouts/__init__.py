"""KV-cache page maps as descriptors."""

from m3hal.layouts.paged import CACHE_FORMATS, PAGE_MAPS, KVLayout, LayoutKind, PagedCache, is_private, page_map
from m3hal.layouts.transfer import BlockRow, PagedRows, convert, pack, unpack

__all__ = [
    "CACHE_FORMATS",
    "PAGE_MAPS",
    "BlockRow",
    "KVLayout",
    "LayoutKind",
    "PagedCache",
    "PagedRows",
    "convert",
    "is_private",
    "pack",
    "page_map",
    "unpack",
]
