"""What reads and copies caches, and the rotation alone, against the definitions."""

import pytest
import torch
from attention_cases import DEVICE, poisoned, sparse_site
from cache_cases import MAPS, empty, raw
from m3hal_conformance.compare import ulps
from m3hal_triton.kv_copy_blocks import kv_copy_blocks
from m3hal_triton.kv_read import kv_read
from m3hal_triton.rope_partial import rope_partial

from m3hal.layouts import BlockRow, PagedCache
from m3hal.ops import load
from m3hal.ops.rope_partial import rope_table

IN_MAPS = pytest.mark.parametrize(("format", "kind"), MAPS, ids=["-".join(m) for m in MAPS])
SITE = sparse_site(torch.bfloat16)


def _random(format, kind, *, heads=3, dim=96, values=None, pages=5):
    """A cache of every byte there is, NaN and subnormal scales too."""
    cache = empty(
        format, kind, heads=heads, dim=dim, values=format != "mxfp4" if values is None else values, pages=pages
    )
    generator = torch.Generator().manual_seed(3)
    whole = torch.randint(0, 256, (raw(cache).numel(),), dtype=torch.uint8, generator=generator)
    size = cache.buf.untyped_storage().size() // cache.buf.element_size()
    torch.as_strided(cache.buf, (size,), (1,), 0).view(torch.uint8).copy_(whole)
    return cache


@IN_MAPS
def test_kv_read(format, kind):
    """Every code and every scale as the definition reads it; zeros for an absent slot."""
    cache = _random(format, kind)
    slots = torch.arange(80, device=DEVICE).repeat_interleave(2)[::2].clone()
    slots[[3, 40]] = -1
    out = [poisoned(80, 3, 96, dtype=torch.float32) for _ in range(2 if cache.layout.has_values else 1)]
    result = kv_read(SITE)(cache, slots, [*out, None][:2])
    exact = load("kv_read").reference(cache, slots)
    for actual, wanted in zip(result, exact, strict=True):
        if wanted is None:
            assert actual is None
            continue
        assert torch.equal(actual.isnan(), wanted.isnan())
        assert torch.equal(actual.nan_to_num(0.0).view(torch.int32), wanted.nan_to_num(0.0).view(torch.int32))


PAIRS = [(3, 0), (0, 4), (-1, 2), (1, 1), (2, -1), (0, 3)]


@IN_MAPS
def test_kv_copy_blocks_between_caches(format, kind):
    """Named pages byte for byte, nothing else."""
    pairs = torch.tensor(PAIRS, device=DEVICE).repeat_interleave(2, 0)[::2]
    written = []
    for copy in (kv_copy_blocks(SITE), load("kv_copy_blocks").reference):
        target = empty(format, kind, heads=3, dim=96, values=format != "mxfp4")
        copy(_random(format, kind), target, pairs)
        written.append(raw(target))
    assert torch.equal(*written)


def test_kv_copy_blocks_within_a_cache():
    """A swap and a chain: every page is read before any is written."""
    pairs = torch.tensor([(0, 1), (1, 0), (2, 3), (3, 4), (-1, 2)], device=DEVICE)
    written = []
    for copy in (kv_copy_blocks(SITE), load("kv_copy_blocks").reference):
        cache = _random("nvfp4", "msa_slot")
        copy(cache, cache, pairs)
        written.append(raw(cache))
    assert torch.equal(*written)


def test_kv_copy_blocks_of_odd_strides_and_of_rows():
    """A slice of wider tokens; rows of block-outer memory, one copy for all layers."""
    pairs = torch.tensor([(1, 0), (4, 3)], device=DEVICE)
    plain = _random("bfloat16", "nhd")
    narrow = [PagedCache(plain.buf.clone()[..., :96], empty("bfloat16", "nhd", heads=3, dim=48, values=True).layout)]
    narrow.append(PagedCache(plain.buf.clone()[..., :96], narrow[0].layout))
    other = [_random("bfloat16", "nhd").buf.flip(0)[..., :96] for _ in range(2)]
    rows = BlockRow((plain.layout, empty("nvfp4", "planar", heads=1, dim=32, values=False).layout))
    blocks = [rows.empty(5, DEVICE) for _ in range(3)]
    for block in blocks:
        block.buf.copy_((torch.arange(block.buf.numel()) % 251).view(block.buf.shape))
    for i, copy in enumerate((kv_copy_blocks(SITE), load("kv_copy_blocks").reference)):
        copy(PagedCache(other[i], narrow[0].layout), narrow[i], pairs)
        copy(blocks[2], blocks[i], pairs)
    assert torch.equal(narrow[0].buf.view(torch.int16), narrow[1].buf.view(torch.int16))
    assert torch.equal(blocks[0].buf, blocks[1].buf)
    kv_copy_blocks(SITE)(blocks[2], blocks[0], pairs[:0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("dim", "rotary"), [(32, 16), (48, 24), (16, 16)])
def test_rope_partial(dtype, dim, rotary):
    """Strided heads within a unit of the larger of a pair, what does not turn bit for bit, no token."""
    site, op = sparse_site(dtype, rotary_dim=rotary), load("rope_partial")
    x = torch.randn(5, 2, 3, dim).to(dtype).to(DEVICE)[:, 1]
    x[0, 0, -1] = float("nan")
    positions, table = torch.tensor([0, 5, 99, 3, 64], device=DEVICE), rope_table(100, rotary, 1e4).to(DEVICE)
    out = rope_partial(site)(x, positions, table, out=poisoned(5, 3, dim, dtype=dtype))
    exact = op.reference(x.double(), positions, table.double(), **op.static_values(site))
    size = exact.abs().nan_to_num(0.0)
    half = rotary // 2
    large = torch.maximum(size[..., :half], size[..., half:rotary])
    unit = torch.cat([large, large, size[..., rotary:]], -1)
    # two products and their sum are rounded in fp32, which only fp32 shows
    score = ulps("out", out, exact, 2.0 if dtype == torch.float32 else 1.0, unit)
    assert score.passed, str(score)
    assert torch.equal(out[..., rotary:].isnan(), x[..., rotary:].isnan())
    assert torch.equal(out[..., rotary:].nan_to_num(0.0), x[..., rotary:].nan_to_num(0.0))
    assert rope_partial(site)(x[:0], positions[:0], table).shape == (0, 3, dim)
