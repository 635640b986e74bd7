"""What needs a GPU: MiniMax-M3's real shapes, and caches past 2**31 elements."""

from dataclasses import replace

import pytest
import torch
from cache_cases import empty
from m3hal_conformance.compare import ulps
from m3hal_triton.kv_write import kv_write
from m3hal_triton.qk_norm_rope_insert import qk_norm_rope_insert
from machine_cases import site as real_site

from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import QKNorms, load
from m3hal.ops.rope_partial import rope_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the interpreter runs the small cases")

FORMATS = pytest.mark.parametrize(
    ("format", "kind"), [("bfloat16", "hnd"), ("fp8_e4m3", "nhd"), ("nvfp4", "msa_slot"), ("nvfp4", "planar")]
)


def _insertion(heads, kv, keys, tokens=600):
    """q, index_q of an insertion into the first slots, shuffled, and the arguments that made them."""
    torch.manual_seed(0)
    q_heads, kv_heads = heads
    site = replace(
        real_site("sparse_attention", "bfloat16"), num_q_heads=q_heads, num_kv_heads=kv_heads, num_index_heads=kv_heads
    )
    width = (q_heads + 3 * kv_heads + 1) * 128
    qkv = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    norms = QKNorms(*(torch.randn(128, device="cuda", dtype=torch.bfloat16) for _ in range(4)))
    positions = torch.randint(0, 65536, (tokens,), device="cuda")
    slots, index_slots = (torch.randperm(tokens, device="cuda") for _ in range(2))
    slots[5], index_slots[7] = -1, -1
    table = rope_table(65536, 64, 5e6, "cuda")
    arguments = (qkv, norms, positions, table, kv, keys, slots, index_slots)
    return site, arguments, qk_norm_rope_insert(site)(*arguments)


@FORMATS
@pytest.mark.parametrize("heads", [(64, 4), (16, 1)], ids=["TP1", "TP4"])
def test_insertion_at_real_shapes(format, kind, heads):
    """q within a unit of the definition; the cached bytes its own, but for a few keys where rounding was near a tie."""
    shape = {"heads": heads[1], "dim": 128, "page_size": 128}
    kv = empty(format, kind, values=True, **shape)
    keys = empty(format, kind, values=False, **(shape | {"heads": 1}))
    site, arguments, (q, index_q) = _insertion(heads, kv, keys)
    op = load("qk_norm_rope_insert")
    other = [replace(c, buf=empty(format, kind, values=c.layout.has_values, **(shape | {"heads": c.layout.heads})).buf)
             for c in (kv, keys)]  # fmt: skip
    wanted = op.reference(*arguments[:4], *other, *arguments[6:], **op.static_values(site))
    for actual, exact in ((q, wanted[0]), (index_q, wanted[1])):
        size = torch.maximum(exact[..., :32].abs(), exact[..., 32:64].abs()).float()
        unit = torch.cat([size, size, exact[..., 64:].abs().float()], -1)
        score = ulps("out", actual, exact.double(), 1.0, unit)
        assert score.passed, str(score)
    for ours, theirs in zip((kv, keys), other, strict=True):
        differs = ours.buf.view(torch.uint8) != theirs.buf.view(torch.uint8)
        assert differs.float().mean() < 2e-3


@FORMATS
@pytest.mark.parametrize("heads", [(64, 4), (16, 1)], ids=["TP1", "TP4"])
def test_insertion_has_the_same_bits_alone_and_in_any_batch(format, kind, heads):
    """Few and many tokens are shared out among programs in different ways."""
    shape = {"heads": heads[1], "dim": 128, "page_size": 128}
    whole = [empty(format, kind, values=True, **shape), empty(format, kind, values=False, **(shape | {"heads": 1}))]
    site, (qkv, norms, positions, table, *_, slots, index_slots), outs = _insertion(heads, *whole)
    for first, count in ((0, 1), (70, 3), (100, 64), (200, 65)):
        some = slice(first, first + count)
        rest = [replace(c, buf=c.buf.clone()) for c in whole]
        for cache in rest:
            cache.buf.view(torch.uint8).fill_(0x5A)
        again = qk_norm_rope_insert(site)(
            qkv[some], norms, positions[some], table, *rest, slots[some], index_slots[some]
        )
        assert all(torch.equal(part, out[some]) for part, out in zip(again, outs, strict=True))
        for cache, one, where in zip(whole, rest, (slots[some], index_slots[some]), strict=True):
            kept = where[where >= 0]
            read = [[load("kv_read").reference(c, kept)[i] for i in range(cache.layout.parts)] for c in (cache, one)]
            assert all(torch.equal(a, b) for a, b in zip(*read, strict=True))


@FORMATS
def test_caches_beyond_2_to_the_31_elements(format, kind):
    """64-bit offsets: the last pages of a cache of more than 2**31 elements get what a small one's get."""
    layout, index = (KVLayout(kind, format, 128, heads, 128, heads > 1) for heads in (4, 1))
    caches = []
    for pages in (8, None):
        made = []
        for some in (layout, index):
            per_page = torch.Size(some.page_shape()).numel()
            count = pages or 2**31 // per_page + 16
            buffer = torch.empty(count, *some.page_shape(), dtype=some.dtype, device="cuda")
            buffer[-8:].view(torch.uint8).fill_(0x5A)
            made.append(PagedCache(buffer, some))
        caches.append(made)
    for kv, keys in caches:
        site, arguments, _ = _insertion((64, 4), *caches[0])
        slots, index_slots = arguments[6:]
        ahead = [(len(c.buf) - 8) * 128 for c in (kv, keys)]
        moved = [torch.where(s < 0, s, s + a) for s, a in zip((slots, index_slots), ahead, strict=True)]
        qk_norm_rope_insert(site)(*arguments[:4], kv, keys, *moved)
        k, v = torch.randn(2, 3, 4, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        last = torch.tensor([1023, 1000, 900], device="cuda") + ahead[0]
        kv_write(site)(kv, k, v, last)
    for small, large in zip(*caches, strict=True):
        assert torch.equal(small.buf.view(torch.uint8), large.buf[-8:].view(torch.uint8))
