"""What limits on single attributes can't say."""

from dataclasses import replace

import pytest
import torch
from attention_cases import sparse_site
from m3hal_triton import limits

SITE = sparse_site(torch.float32)


@pytest.mark.parametrize("refuses", [limits.ranked, limits.indexer])
def test_contexts_of_more_blocks_than_a_program_ranks(refuses):
    """32768 blocks are served; one key more is refused by a sentence that says what would be served."""
    site = replace(SITE, block_size=16, max_context=(1 << 15) * 16)
    assert refuses(site) is None
    assert "lower it to 524288" in refuses(replace(site, max_context=site.max_context + 1))


@pytest.mark.parametrize(("page", "block", "nest"), [(48, 96, True), (96, 48, True), (32, 48, False)])
def test_blocks_and_pages_nest(page, block, nest):
    """One is a multiple of the other."""
    site = replace(SITE, page_size=page, block_size=block)
    assert (limits.attention(site) is None) == (limits.indexer(site) is None) == nest


def test_finer_caches_than_activations():
    """bf16 products would round fp32 keys."""
    site = replace(SITE, dtype="bfloat16", kv_format="float32", index_format="float32")
    assert "kv_format" in limits.cache(site)
    assert "index_format" in limits.indexer(site)


@pytest.mark.parametrize(("heads", "dim", "served"), [(64, 256, True), (65, 256, False), (256, 128, True)])
def test_groups_that_fit_shared_memory(heads, dim, served):
    """128 heads of 256 elements beside three steps of keys and values were 262144 bytes."""
    site = replace(SITE, num_q_heads=heads, num_kv_heads=1, head_dim=dim)
    for refuses in (limits.cache, limits.attention):
        assert (refuses(site) is None) == served


@pytest.mark.parametrize(("rotary", "format", "served"), [(64, "nvfp4", True), (16, "nvfp4", False), (24, "", False)])
def test_parts_of_rotated_heads(rotary, format, served):
    """Half of what rotates is a power of two and holds whole groups of the cache."""
    site = replace(SITE, head_dim=96, index_dim=0, rotary_dim=rotary, kv_format=format or "bfloat16")
    assert (limits.rotated_cache(site) is None) == served
