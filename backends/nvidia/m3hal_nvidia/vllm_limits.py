"""Where vLLM's kernels serve. Standard library only: plans import this anywhere."""

from __future__ import annotations

from m3hal.shape import Site

#: query tokens of a verify up to which vLLM's split decode was faster on an H200 than m3hal-triton's
FEW_TOKENS = 8


def one_block_pages(site: Site) -> str | None:
    """A page holds one block."""
    if site.page_size != site.block_size:
        return f"page_size {site.page_size} is not block_size {site.block_size}; vLLM's pages hold one block"
    return None
