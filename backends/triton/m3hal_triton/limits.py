"""What a site must satisfy beyond limits on single attributes. Standard library only: plans import this anywhere."""

from __future__ import annotations

from m3hal.shape import Site


def cache(site: Site) -> str | None:
    """The cache holds the activations' dtype."""
    if site.kv_format != site.dtype:
        return f"kv_format is {site.kv_format} and dtype is {site.dtype}; these kernels take a cache of the same dtype"
    return None


def attention(site: Site) -> str | None:
    """The cache holds the activations' dtype, and a block and a page nest."""
    return cache(site) or _nesting(site)


def rotated_cache(site: Site) -> str | None:
    """The caches hold the activations' dtype, and a head splits into two rotated halves and a rest, powers of two."""
    for name, dim in (("head_dim", site.head_dim), ("index_dim", site.index_dim)):
        half, rest = site.rotary_dim // 2, dim - site.rotary_dim
        if dim and not (_power_of_two(half) and (rest == 0 or _power_of_two(rest))):
            return f"{name} {dim} with rotary_dim {site.rotary_dim} does not split into powers of two"
    if site.index_format and site.index_format != site.dtype:
        return f"index_format is {site.index_format} and dtype is {site.dtype}; these kernels take a cache of one dtype"
    return cache(site)


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def indexer(site: Site) -> str | None:
    """The index cache holds the activations' dtype, and a block and a page nest."""
    if site.index_format != site.dtype:
        return f"index_format is {site.index_format} and dtype is {site.dtype}; these kernels take a cache of one dtype"
    return _nesting(site)


def _nesting(site: Site) -> str | None:
    if site.block_size and site.page_size % site.block_size and site.block_size % site.page_size:
        return f"page_size {site.page_size} and block_size {site.block_size} do not divide one another"
    return None
