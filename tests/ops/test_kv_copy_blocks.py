"""kv_copy_blocks: pages move byte for byte, and nothing else does."""

import pytest
import torch
from m3hal_conformance import bits

from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops.kv_copy_blocks import kv_copy_blocks

LAYOUT = KVLayout("hnd", "bfloat16", 4, 2, 8, True)


def every_byte(pages, layout=LAYOUT):
    """A cache whose bit patterns differ from element to element and include NaNs of many kinds."""
    cache = layout.empty(pages)
    pattern = torch.arange(cache.buf.numel()).view(cache.buf.shape)
    bits(cache.buf).copy_((pattern * 257).to(bits(cache.buf).dtype))
    return cache


def test_pages_are_copied(run):
    """Source to destination; a pair with a negative id is skipped; other pages keep their bytes."""
    src, dst = every_byte(6), LAYOUT.empty(5)
    dst.buf.fill_(1.0)
    pairs = torch.tensor([[5, 0], [-1, 1], [2, -1], [3, 4]])
    _, written = run("kv_copy_blocks", src, dst, pairs)
    out = written["dst"].buf
    assert torch.equal(bits(out[[0, 4]]), bits(src.buf[[5, 3]]))
    assert out[1:4].eq(1.0).all()


def test_no_pairs(run):
    """Nothing happens."""
    dst = every_byte(2)
    _, written = run("kv_copy_blocks", every_byte(3), dst, torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(bits(written["dst"].buf), bits(dst.buf))


def test_swap_within_a_cache():
    """Every page is read before any is written."""
    cache = every_byte(3)
    before = cache.buf.clone()
    kv_copy_blocks(cache, cache, torch.tensor([[0, 2], [2, 0]]))
    assert torch.equal(bits(cache.buf), bits(before[[2, 1, 0]]))


def test_between_strides(run):
    """From plain pages into one layer of block-outer memory and back: the same bytes."""
    src = every_byte(3)
    outer = PagedCache(torch.zeros(4, 7, *LAYOUT.page_shape(), dtype=torch.bfloat16)[:, 3], LAYOUT)
    _, packed = run("kv_copy_blocks", src, outer, torch.tensor([[0, 3], [1, 2], [2, 0]]))
    _, back = run("kv_copy_blocks", packed["dst"], every_byte(3), torch.tensor([[3, 0], [2, 1], [0, 2]]))
    assert torch.equal(bits(back["dst"].buf), bits(src.buf))


def test_layouts_must_agree():
    """Bytes of another layout mean something else; the message says what to use."""
    other = KVLayout("nhd", "bfloat16", 4, 2, 8, True)
    with pytest.raises(ValueError, match="kv_read"):
        kv_copy_blocks(every_byte(1), other.empty(1), torch.tensor([[0, 0]]))
