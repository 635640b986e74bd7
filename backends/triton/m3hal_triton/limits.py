"""What a site must satisfy beyond limits on single attributes. Standard library only: plans import this anywhere."""

from __future__ import annotations

from m3hal.shape import Site


def cache(site: Site) -> str | None:
    """The main cache's numbers are no finer than the activations, and a kv head's queries fit beside its keys."""
    group = site.num_q_heads // max(site.num_kv_heads, 1)
    if site.head_dim > 128 and group > _MOST_WIDE:
        return (
            f"{group} query heads share a kv head of {site.head_dim} elements; beside keys of more than 128 shared "
            f"memory holds {_MOST_WIDE}"
        )
    return _coarser("kv_format", site.kv_format, site)


#: query heads of a kv head of more than 128 elements
_MOST_WIDE = 64


def attention(site: Site) -> str | None:
    """As :func:`cache`, and a block and a page nest."""
    return cache(site) or _nesting(site)


#: columns that share a block scale
_GROUPS = {"nvfp4": 16, "mxfp4": 32}


def rotated_cache(site: Site) -> str | None:
    """A head splits into parts as wide as half of what rotates, a power of two of whole groups of the caches."""
    half = site.rotary_dim // 2
    for name, dim, format in (
        ("head_dim", site.head_dim, site.kv_format),
        ("index_dim", site.index_dim, site.index_format),
    ):
        if dim and not (_power_of_two(half) and dim % half == 0):
            return f"{name} {dim} with rotary_dim {site.rotary_dim} does not split into powers of two"
        if dim and half % _GROUPS.get(format, 1):
            return f"{format} shares a scale among {_GROUPS[format]} columns, and half of rotary_dim is {half}"
    return None


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def indexer(site: Site) -> str | None:
    """As :func:`ranked`; the index cache's numbers are no finer than the activations, and a block and a page nest."""
    return _coarser("index_format", site.index_format, site) or _nesting(site) or ranked(site)


#: blocks of a context; two counts of them share a register, and a program holds them all
_MOST_BLOCKS = 1 << 15


def ranked(site: Site) -> str | None:
    """A row of scores is ranked by one program."""
    if site.block_size and site.max_context > _MOST_BLOCKS * site.block_size:
        return (
            f"max_context {site.max_context} is more than {_MOST_BLOCKS} blocks of {site.block_size} keys, which is "
            f"what one program ranks; lower it to {_MOST_BLOCKS * site.block_size}, or take larger blocks"
        )
    return None


def _coarser(name: str, format: str, site: Site) -> str | None:
    if format == "float32" and site.dtype != "float32":
        return f"{name} is float32 and dtype is {site.dtype}; products in {site.dtype} would round the cache's numbers"
    return None


def _nesting(site: Site) -> str | None:
    if site.block_size and site.page_size % site.block_size and site.block_size % site.page_size:
        return f"page_size {site.page_size} and block_size {site.block_size} do not divide one another"
    return None


#: fp16's largest number, less what rounding may add
_HALF = 60000


def experts(site: Site) -> str | None:
    """Plain weights are of the activations' dtype; hidden activations stay in fp16's range where weights are stored."""
    shared = site.shared_format if site.shared_intermediate_size else ""
    for name, format in (("weight_format", site.weight_format), ("shared_format", shared)):
        if format in ("float32", "bfloat16") and format != site.dtype:
            return f"{name} is {format} and dtype is {site.dtype}; plain weights are of the activations' dtype"
    if site.dtype == "float32":
        return None
    stored = [format for format in (site.weight_format, shared) if format not in ("", "bfloat16")]
    if stored and site.limit * (site.limit + abs(site.beta)) > _HALF:
        return f"limit {site.limit} lets hidden activations leave fp16, in which products of stored weights run"
    return None
