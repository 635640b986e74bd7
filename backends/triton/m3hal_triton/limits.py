"""What a site must satisfy beyond limits on single attributes. Standard library only: plans import this anywhere."""

from __future__ import annotations

from m3hal.shape import Site


def attention(site: Site) -> str | None:
    """The cache holds the activations' dtype, and a block and a page nest."""
    if site.kv_format != site.dtype:
        return f"kv_format is {site.kv_format} and dtype is {site.dtype}; these kernels take a cache of the same dtype"
    return _nesting(site)


def indexer(site: Site) -> str | None:
    """The index cache holds the activations' dtype, and a block and a page nest."""
    if site.index_format != site.dtype:
        return f"index_format is {site.index_format} and dtype is {site.dtype}; these kernels take a cache of one dtype"
    return _nesting(site)


def _nesting(site: Site) -> str | None:
    if site.block_size and site.page_size % site.block_size and site.block_size % site.page_size:
        return f"page_size {site.page_size} and block_size {site.block_size} do not divide one another"
    return None
