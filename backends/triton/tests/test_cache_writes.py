"""What writes caches, byte for byte against the definitions, in every format and page map."""

from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, poisoned, sparse_site
from cache_cases import MAPS, empty, every_bf16, raw
from m3hal_triton import qk_norm_rope_insert as insertion
from m3hal_triton.kv_write import kv_write
from m3hal_triton.qk_norm_rope_insert import qk_norm_rope_insert

from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import QKNorms, load
from m3hal.ops.rope_partial import rope_table

IN_MAPS = pytest.mark.parametrize(("format", "kind"), MAPS, ids=["-".join(m) for m in MAPS])
#: around page boundaries, out of order, with tokens that are not stored
SLOTS = [15, 16, 0, -1, 61, 79, 17]


def _both(format, kind, k, v, slots):
    """Bytes after our write and after the definition's."""
    written = []
    for write in (kv_write(sparse_site(k.dtype)), load("kv_write").reference):
        cache = empty(format, kind, heads=k.shape[1], dim=k.shape[2], values=v is not None)
        write(cache, k, v, slots)
        written.append(raw(cache))
    return written


@IN_MAPS
@pytest.mark.parametrize("values", [True, False], ids=["main", "index"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kv_write(format, kind, values, dtype):
    """Magnitudes from 2**-20 to 2**20, heads and columns that are no power of two, slices of a wider row."""
    if format == "mxfp4" and values:
        pytest.skip("mxfp4 holds index keys only: the layout refuses values")
    x = torch.randn(2, len(SLOTS), 5, 96, device=DEVICE) * torch.exp2(20 * torch.randn(2, len(SLOTS), 5, 1).tanh()).to(
        DEVICE
    )
    k, v = x.to(dtype)[:, :, 1:4]
    slots = torch.tensor(SLOTS, device=DEVICE).repeat_interleave(2)[::2]
    ours, theirs = _both(format, kind, k, v if values else None, slots)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("format", "kind"), [("fp8_e4m3", "hnd"), ("nvfp4", "planar"), ("mxfp4", "planar")])
def test_kv_write_rounds_every_number_as_the_codec_does(format, kind):
    """All bf16 numbers and both neighbours of each: ties, subnormals, saturation, NaN, signed zeros."""
    x = every_bf16().view(128, 12, 128)
    slots = torch.arange(128, device=DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    mixed = x.flatten()[torch.randperm(x.numel(), generator=generator, device=DEVICE)].view(x.shape)
    for numbers in (x, mixed, torch.zeros_like(x[:2]), -torch.zeros_like(x[:2])):
        written = []
        for write in (kv_write(sparse_site(torch.float32)), load("kv_write").reference):
            cache = empty(format, kind, heads=12, dim=128, values=False, pages=8)
            write(cache, numbers, None, slots[: len(numbers)])
            written.append(raw(cache))
        assert torch.equal(*written)


def test_kv_write_of_no_token_and_of_unstored_tokens():
    """Not a byte changes."""
    k = torch.randn(3, 2, 32, device=DEVICE)
    for tokens in (0, 3):
        cache = empty("nvfp4", "msa_slot", heads=2, dim=32, values=False)
        kv_write(sparse_site(torch.float32))(cache, k[:tokens], None, torch.full((tokens,), -1, device=DEVICE))
        assert (raw(cache) == 0x5A).all()


def test_a_slot_that_is_not_contiguous_is_refused():
    """A planar page with bytes between its bytes has no page map."""
    layout = KVLayout("planar", "nvfp4", 16, 1, 32, False)
    buffer = torch.empty(2, layout.page_bytes() * 2, dtype=torch.uint8, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        kv_write(sparse_site(torch.float32))(
            PagedCache(buffer, layout), torch.ones(1, 1, 32, device=DEVICE), None, torch.zeros(1, dtype=torch.int64)
        )


def _insertion(site, format, kind, index_format, index_kind, dtype=torch.bfloat16, seed=0):
    """q, index_q and the caches after an insertion of the same rows into caches of these formats."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    tokens, dim, index_dim = len(SLOTS), site.head_dim, site.index_dim
    width = (site.num_q_heads + 2 * site.num_kv_heads) * dim + (site.num_index_heads + 1) * index_dim
    qkv = (randn(tokens, width) * torch.exp2(3 * randn(tokens, 1)))[:, :width]
    norms = QKNorms(*(randn(dim) for _ in range(2)), *(randn(index_dim) for _ in range(2)))
    kv = empty(format, kind, heads=site.num_kv_heads, dim=dim, values=True)
    keys = empty(index_format, index_kind, heads=1, dim=index_dim, values=False)
    slots, index_slots = torch.tensor(SLOTS, device=DEVICE), torch.tensor(SLOTS[::-1], device=DEVICE)
    table = rope_table(100, site.rotary_dim, 1e4).to(DEVICE)
    positions = torch.tensor([0, 5, 99, 3, 64, 7, 8], device=DEVICE)
    out = tuple(
        poisoned(tokens, heads, size, dtype=dtype)
        for heads, size in ((site.num_q_heads, dim), (site.num_index_heads, index_dim))
    )
    qk_norm_rope_insert(site)(qkv, norms, positions, table, kv, keys, slots, index_slots, out=out)
    return out, kv, keys


@IN_MAPS
@pytest.mark.parametrize("heads", [(16, 1, 1), (6, 3, 3)], ids=["TP4", "few"])
@pytest.mark.parametrize("shares", [insertion.FEW, insertion.MIDDLE, insertion.MANY], ids=["one", "64", "8192"])
def test_insertion_rounds_once_to_the_cache(monkeypatch, format, kind, heads, shares):
    """The bytes are those of the fp32 numbers that the same insertion puts into fp32 caches, rounded by the codec."""
    monkeypatch.setattr(insertion, "shares", lambda *given: shares)
    counts = dict(zip(("num_q_heads", "num_kv_heads", "num_index_heads"), heads, strict=True))
    site = sparse_site(torch.bfloat16, head_dim=128, index_dim=128, rotary_dim=64, **counts)
    main = (format, kind) if format != "mxfp4" else ("nvfp4", kind)
    out, kv, keys = _insertion(site, *main, format, kind)
    exact_out, exact_kv, exact_keys = _insertion(site, "float32", "hnd", "float32", "hnd")
    assert torch.equal(out[0], exact_out[0])
    assert torch.equal(out[1], exact_out[1])
    for cache, exact, slots in ((kv, exact_kv, SLOTS), (keys, exact_keys, SLOTS[::-1])):
        stored = torch.tensor([slot for slot in slots if slot >= 0], device=DEVICE)
        page, offset = stored // 16, stored % 16
        vectors = [exact.k[page, :, offset], exact.v[page, :, offset] if cache.layout.has_values else None]
        wanted = replace(cache, buf=empty(cache.layout.format, cache.layout.kind, heads=cache.layout.heads, dim=128,
                                          values=cache.layout.has_values).buf)  # fmt: skip
        load("kv_write").reference(wanted, *vectors, stored)
        assert torch.equal(raw(cache), raw(wanted))
