"""kv_read: the numbers that the bytes of a slot stand for."""

import pytest
import torch
from m3hal_conformance.inputs import batch, generator

from m3hal.layouts import KVLayout
from m3hal.ops.kv_read import kv_read, read_sequence
from m3hal.ops.kv_write import kv_write


@pytest.mark.parametrize("kind", ["hnd", "nhd"])
@pytest.mark.parametrize("format", ["float32", "bfloat16", "float64"])
def test_bytes_by_hand(run, kind, format):
    """Slot -> page, offset -> the layout's place; keys first; exact."""
    layout = KVLayout(kind, format, 4, 2, 3, True)
    cache = layout.empty(3)
    cache.buf.copy_(torch.arange(cache.buf.numel()).view(cache.buf.shape) % 251)
    slots = torch.tensor([0, 7, 8, 11])
    k, v = run("kv_read", cache, slots) if format != "float64" else kv_read(cache, slots)
    assert k.dtype == v.dtype == (torch.float64 if format == "float64" else torch.float32)
    for i, slot in enumerate(slots.tolist()):
        for head in range(2):
            page, offset = cache.buf[slot // 4], slot % 4
            row = page[head, offset] if kind == "hnd" else page[offset, head]
            assert k[i, head].tolist() == row[:3].tolist()
            assert v[i, head].tolist() == row[3:].tolist()


def test_a_negative_slot_reads_zeros(run):
    """Although slot 0, which an index of -1 clamps to, holds NaN."""
    cache = KVLayout("hnd", "float32", 4, 1, 8, True).empty(1)
    cache.buf.fill_(float("nan"))
    k, v = run("kv_read", cache, torch.tensor([-1, 0]))
    assert not k[0].any()
    assert not v[0].any()
    assert k[1].isnan().all()


def test_index_cache_and_no_slots(run):
    """An index cache has no values; no slots give no rows."""
    cache = KVLayout("nhd", "bfloat16", 4, 1, 8, False).empty(1)
    k, v = run("kv_read", cache, torch.empty(0, dtype=torch.int64))
    assert k.shape == (0, 1, 8)
    assert v is None


@pytest.mark.parametrize("kind", ["hnd", "nhd"])
def test_what_was_written_is_read(run, kind):
    """Round trip in the order of the slots, and as sequences through shuffled pages."""
    rng = generator("kv_read/trip")
    requests = batch([(1, 9), (1, 4)], 4, rng)
    keys, values = ([torch.randn(length, 2, 8, generator=rng) for _, length in requests.lengths] for _ in range(2))
    cache = requests.cache(KVLayout(kind, "float32", 4, 2, 8, True), keys, values, kv_write)
    for request, length in enumerate((9, 4)):
        k, v = run("kv_read", cache, requests.slots(request))
        assert torch.equal(k, keys[request])
        assert torch.equal(v, values[request])
        k, v = read_sequence(cache, requests.meta.block_table[request], length)
        assert torch.equal(k.transpose(0, 1), keys[request])
        assert torch.equal(v.transpose(0, 1), values[request])
