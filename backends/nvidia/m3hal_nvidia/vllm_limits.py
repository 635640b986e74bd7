"""Where vLLM's kernels serve. Standard library only: plans import this anywhere."""

from __future__ import annotations

from m3hal.shape import Site

#: query tokens of a verify up to which vLLM's split decode was faster on an H200 than m3hal-triton's: for four of one
#: request 9.2 us against 10.0 (bf16, four kv heads), 7.1 against 8.5 (bf16, one), 9.0 against 10.1 (FP8, one)
FEW_TOKENS = 4


def one_block_pages(site: Site) -> str | None:
    """A page holds one block."""
    if site.page_size != site.block_size:
        return f"page_size {site.page_size} is not block_size {site.block_size}; vLLM's pages hold one block"
    return None
