"""kv_write: every byte lands where the layout says, and no other byte moves."""

import pytest
import torch
from m3hal_conformance import bits
from m3hal_conformance.inputs import generator

from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops.kv_write import kv_write


def poisoned(layout, pages=4):
    cache = layout.empty(pages)
    cache.buf.fill_(float("nan"))
    return cache


def numbers(tokens, heads, dim):
    return torch.randn(tokens, heads, dim, generator=generator(f"kv_write/{tokens}/{heads}/{dim}"))


@pytest.mark.parametrize("kind", ["hnd", "nhd"])
@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_bytes_by_hand(run, kind, format):
    """Each token at [page, head, offset] or [page, offset, head], keys first, rounded once; the rest is untouched."""
    layout = KVLayout(kind, format, 128, 2, 8, True)
    k, v = numbers(5, 2, 8), numbers(5, 2, 8) + 10
    slots = torch.tensor([127, 128, -1, 511, 0])  # the last of a page, the first of the next, none, the very last
    _, written = run("kv_write", poisoned(layout), k, v, slots)
    expected = poisoned(layout)
    for token, slot in enumerate(slots.tolist()):
        for head in range(2):
            if slot >= 0:
                row = torch.cat([k[token, head], v[token, head]]).to(expected.buf.dtype)
                where = (head, slot % 128) if kind == "hnd" else (slot % 128, head)
                expected.buf[slot // 128][where] = row
    assert torch.equal(bits(written["cache"].buf), bits(expected.buf))


def test_index_cache(run):
    """Keys only, one head."""
    layout = KVLayout("hnd", "float32", 4, 1, 8, False)
    k = numbers(2, 1, 8)
    _, written = run("kv_write", poisoned(layout), k, None, torch.tensor([3, 4]))
    buf = written["cache"].buf
    assert torch.equal(torch.stack([buf[0, 0, 3], buf[1, 0, 0]]), k[:, 0])
    assert buf.isfinite().sum() == 16


@pytest.mark.parametrize("slots", [[], [-1, -1], [-7]])
def test_nothing_to_write(run, slots):
    """No tokens, and padded tokens, leave the cache as it is, although their numbers are NaN."""
    layout = KVLayout("nhd", "bfloat16", 4, 2, 8, True)
    cache = layout.empty(2)
    cache.buf.fill_(3.0)
    k = torch.full((len(slots), 2, 8), float("nan"))
    _, written = run("kv_write", cache, k, k, torch.tensor(slots, dtype=torch.int64))
    assert written["cache"].buf.eq(3.0).all()


def test_block_outer_buffer(run):
    """A cache that is one layer of block-outer memory: neighbours between its pages stay untouched (guard bands)."""
    layout = KVLayout("hnd", "float32", 4, 2, 8, True)
    every_layer = torch.full((3, 5, *layout.page_shape()), float("nan"))  # [pages, layers, ...]
    k, v = numbers(2, 2, 8), numbers(2, 2, 8) * 2
    _, written = run("kv_write", PagedCache(every_layer[:, 2], layout), k, v, torch.tensor([11, 4]))
    buf = written["cache"].buf
    assert buf.stride(0) == 5 * 2 * 4 * 16
    assert torch.equal(buf[2, :, 3, :8], k[0])
    assert torch.equal(buf[1, :, 0, 8:], v[1])


def test_heads_of_the_projection(run):
    """k and v as slices of the projection's row give what their copies give."""
    layout = KVLayout("hnd", "bfloat16", 4, 2, 8, True)
    row = numbers(3, 1, 100)[:, 0]
    k, v, slots = row[:, 10:26].view(3, 2, 8), row[:, 26:42].view(3, 2, 8), torch.tensor([0, 5, 2])
    strided = run("kv_write", poisoned(layout), k, v, slots)[1]["cache"]
    copied = run("kv_write", poisoned(layout), k.clone(), v.clone(), slots)[1]["cache"]
    assert torch.equal(bits(strided.buf), bits(copied.buf))


def test_a_slot_is_written_again():
    """A re-used slot holds the later token."""
    cache = poisoned(KVLayout("hnd", "float32", 4, 1, 8, False))
    k = numbers(2, 1, 8)
    kv_write(cache, k[:1], None, torch.tensor([6]))
    kv_write(cache, k[1:], None, torch.tensor([6]))
    assert torch.equal(cache.k[1, 0, 2], k[1, 0])


def test_values_belong_to_main_caches():
    """v without room for it, or room without v, is refused in a sentence."""
    k = numbers(1, 1, 8)
    for has_values, v in ((True, None), (False, k)):
        with pytest.raises(ValueError, match="index cache, which holds keys only"):
            kv_write(poisoned(KVLayout("hnd", "float32", 4, 1, 8, has_values)), k, v, torch.tensor([0]))
