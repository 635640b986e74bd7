"""Copies whole pages, byte for byte, within a cache or between two of one layout.

    dst[pairs[i, 1]] = src[pairs[i, 0]]

Source: vLLM ``copy_blocks`` and ``swap_blocks``.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.layouts import PagedCache, PagedRows
from m3hal.ops._operator import Numeric, Operator


def kv_copy_blocks(src: PagedCache | PagedRows, dst: PagedCache | PagedRows, pairs: torch.Tensor) -> None:
    """Copies pages; every other byte of ``dst`` stays as it is.

    Args:
        src: read; it may be ``dst``, and then every page is read before any is written. Either one cache, or the rows
            of block-outer memory: then a pair moves one block of all layers, which is one contiguous copy.
        dst: written in place; its layout equals src's, its strides may differ.
        pairs: int64 [n, 2], (source page, destination page). A pair with a negative id is skipped; no destination may
            come twice.
    """
    if src.layout != dst.layout:
        raise ValueError(
            f"pages are copied byte for byte, so both caches need one layout, not {src.layout} and {dst.layout}; "
            "use m3hal.layouts.convert for another page map, kv_read and kv_write for another format"
        )
    source, destination = pairs[(pairs >= 0).all(-1)].unbind(-1)
    dst.buf.view(src.buf.dtype)[destination] = src.buf[source]


def fake(src: PagedCache | PagedRows, dst: PagedCache | PagedRows, pairs: torch.Tensor, **_: object) -> None:
    """No output."""


OPERATOR = Operator(
    name="kv_copy_blocks",
    kind="core",
    reference=kv_copy_blocks,
    fake=fake,
    numeric=Numeric("X"),
    sites=("dense_attention", "sparse_attention", "drafter"),
    group="cache",
    mutates=("dst",),
    source="vLLM copy_blocks",
)
