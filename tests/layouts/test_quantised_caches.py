"""Quantised caches: written by kv_write, read by a decoder that shares nothing with m3hal, byte by byte."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from m3hal_conformance.decoder import Page, decode_slot

from m3hal.layouts import CACHE_FORMATS, KVLayout, PagedCache
from m3hal.ops.kv_read import kv_read, read_sequence
from m3hal.ops.kv_write import kv_write

MAIN = [
    (kind, format) for format, kinds in CACHE_FORMATS.items() for kind in kinds if format not in ("mxfp4", "float64")
]
INDEX = [(kind, format) for format, kinds in CACHE_FORMATS.items() for kind in kinds if format != "float64"]
K_SCALE, V_SCALE = torch.tensor(0.5), torch.tensor(0.37)


def filled(
    layout: KVLayout, pages: int, tokens: int, seed: int = 3
) -> tuple[PagedCache, torch.Tensor, list[torch.Tensor]]:
    """A cache full of 0xA5, then written: cache, slots in random order, and the vectors."""
    generator = torch.Generator().manual_seed(seed)
    cache = layout.empty(pages)
    cache.buf.view(torch.uint8).fill_(0xA5)
    if layout.has_values and layout.format in ("fp8_e4m3", "fp8_e4m3_240", "nvfp4"):
        cache = PagedCache(cache.buf, layout, K_SCALE, V_SCALE)
    slots = torch.randperm(pages * layout.page_size, generator=generator)[:tokens]
    vectors = [torch.randn(tokens, layout.heads, layout.dim, generator=generator) for _ in range(layout.parts)]
    kv_write(cache, vectors[0], vectors[1] if layout.has_values else None, slots)
    return cache, slots, vectors


def scale_of(cache: PagedCache, part: str) -> float:
    scale = cache.k_scale if part == "k" else cache.v_scale
    return 1.0 if scale is None else float(scale)


@pytest.mark.parametrize(("kind", "format"), MAIN)
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
def test_the_decoder_reads_what_was_written(kind: str, format: str, heads: int) -> None:
    """Main caches of every format, page map and head count: kv_read and the decoder see the same numbers."""
    layout = KVLayout(kind, format, 16, heads, 32, True)
    cache, slots, vectors = filled(layout, 3, 5)
    raw = cache.buf.view(torch.uint8).flatten().numpy()
    read = dict(zip("kv", kv_read(cache, slots), strict=True))
    for part, given in zip("kv", vectors, strict=True):
        theirs = np.stack(
            [decode_slot(raw, Page.of(layout), slot, part, scale_of(cache, part)) for slot in slots.tolist()]
        )
        assert (read[part].numpy() == theirs.astype(np.float32)).all()
        coarse = 0.2 if format == "nvfp4" else 0.05
        assert np.linalg.norm(theirs - given.numpy()) < coarse * np.linalg.norm(given.numpy())


@pytest.mark.parametrize(("kind", "format"), INDEX)
def test_index_caches(kind: str, format: str) -> None:
    """One head of keys, no values, no global scale."""
    layout = KVLayout(kind, format, 16, 1, 64, False)
    cache, slots, _ = filled(layout, 3, 9)
    raw = cache.buf.view(torch.uint8).flatten().numpy()
    k, v = kv_read(cache, slots)
    theirs = np.stack([decode_slot(raw, Page.of(layout), slot, "k") for slot in slots.tolist()])
    assert v is None
    assert (k.numpy() == theirs.astype(np.float32)).all()


@pytest.mark.parametrize(("kind", "format"), MAIN)
def test_no_other_byte_moves(kind: str, format: str) -> None:
    """Writing some tokens leaves the bytes of all others, to the last scale byte; a negative slot writes nothing."""
    layout = KVLayout(kind, format, 8, 2, 32, True)
    cache, slots, vectors = filled(layout, 2, 16)
    before, first = cache.buf.clone(), [read.clone() for read in kv_read(cache, slots)]
    again = torch.where(torch.arange(16) % 3 == 0, slots, -1)
    kv_write(cache, -vectors[0], -vectors[1], again)
    kept = again < 0
    for old, new in zip(first, kv_read(cache, slots), strict=True):
        assert torch.equal(old[kept], new[kept])
        assert not torch.equal(old[~kept], new[~kept])
    kv_write(cache, vectors[0], vectors[1], again)
    assert torch.equal(cache.buf.view(torch.uint8), before.view(torch.uint8))


def test_page_map_a_by_hand() -> None:
    """M3's slots of 9,216 bytes: [2 * heads, 128, 72], keys linear, values interleaved in quads of tokens."""
    layout = KVLayout("msa_slot", "nvfp4", 128, 4, 128, True)
    assert layout.page_shape() == (8, 128, 72)
    cache = layout.empty(2)
    cache.buf.zero_()
    k, v = torch.zeros(1, 4, 128), torch.zeros(1, 4, 128)
    k[0, 3, 37] = 6.0  # group 2, odd element: the high half of byte 18; its scale becomes 1.0, 0x38
    v[0, 1, 100] = 3.0  # group 6, even element; its scale becomes 0.5, 0x30
    kv_write(cache, k, v, torch.tensor([128 + 77]))  # page 1, token 77 = quad 19, place 1
    page = cache.buf[1].flatten(1)
    assert page[6, 77 * 64 + 18] == 0x70
    assert page[6, 8192 + 77 * 8 + 2] == 0x38
    assert page[3, 77 * 64 + 50] == 0x07
    assert page[3, 8192 + 19 * 32 + 6 * 4 + 1] == 0x30
    floor = (page == 1).sum()  # every other group of the token holds zeros at the smallest scale
    assert floor == 2 * 4 * 8 - 2
    assert page.count_nonzero() == floor + 4
    assert cache.buf[0].count_nonzero() == 0


def test_page_map_b_by_hand() -> None:
    """planar: key codes of all heads, their scales, value codes, their scales."""
    layout = KVLayout("planar", "nvfp4", 128, 2, 128, True)
    assert layout.page_shape() == (36864,)
    cache = layout.empty(1)
    cache.buf.zero_()
    k, v = torch.zeros(1, 2, 128), torch.zeros(1, 2, 128)
    k[0, 1, 0], v[0, 1, 127] = 6.0, 6.0
    kv_write(cache, k, v, torch.tensor([5]))
    page = cache.buf[0]
    assert page[8192 + 5 * 64] == 0x07
    assert page[2 * 8192 + 1024 + 5 * 8] == 0x38
    values = 2 * 8192 + 2 * 1024
    assert page[values + 8192 + 5 * 64 + 63] == 0x70
    assert page[values + 2 * 8192 + 1024 + 1 * 32 + 7 * 4 + 1] == 0x38


@pytest.mark.parametrize(("format", "width", "one"), [("nvfp4", 72, 0x38), ("mxfp4", 68, 0x7F)])
def test_page_map_c_by_hand(format: str, width: int, one: int) -> None:
    """Index keys: 8,192 bytes of codes, then linear scales: 1,024 of E4M3 or 512 of E8M0."""
    layout = KVLayout("msa_slot", format, 128, 1, 128, False)
    assert layout.page_shape() == (1, 128, width)
    assert layout.page_bytes() == 8192 + (1024 if format == "nvfp4" else 512)
    cache = layout.empty(1)
    cache.buf.zero_()
    k = torch.zeros(1, 1, 128)
    k[0, 0, 64] = 6.0 if format == "nvfp4" else 4.0
    kv_write(cache, k, None, torch.tensor([127]))
    groups = layout.spec.scale_bytes(128)
    page = cache.buf[0].flatten()
    assert page[127 * 64 + 32] == (0x07 if format == "nvfp4" else 0x06)
    assert page[8192 + 127 * groups + groups // 2] == one


@pytest.mark.parametrize(("kind", "heads", "dim"), list(itertools.product(("msa_slot", "planar"), (2, 4), (128, 256))))
def test_value_scales_are_those_of_their_group(kind: str, heads: int, dim: int) -> None:
    """Group g holds magnitude g + 1: the decoder finds 1..16 in order for every token of a page."""
    layout = KVLayout(kind, "nvfp4", 8, heads, dim, True)
    cache = layout.empty(1)
    v = torch.arange(1.0, dim // 16 + 1).repeat_interleave(16).expand(8, heads, dim)
    kv_write(cache, v, v, torch.arange(8))
    raw = cache.buf.flatten().numpy()
    for token in range(8):
        found = decode_slot(raw, Page.of(layout), token, "v").reshape(heads, -1, 16)
        relative = found / np.arange(1, dim // 16 + 1)[:, None]
        assert (np.abs(relative - 1) < 0.07).all()  # a scale's own rounding; a neighbour's scale would be off by more
        assert (found == decode_slot(raw, Page.of(layout), token, "k").reshape(heads, -1, 16)).all()


@pytest.mark.parametrize(("kind", "format"), MAIN)
def test_a_sequence_reads_its_pages_in_order(kind: str, format: str) -> None:
    """read_sequence is kv_read of the request's slots; the last page is cut at the length."""
    layout = KVLayout(kind, format, 8, 2, 32, True)
    cache, _, _ = filled(layout, 4, 32)
    table = torch.tensor([2, 0, 3, -1], dtype=torch.int32)
    k, v = read_sequence(cache, table, 19)
    slots = torch.cat([torch.arange(16, 24), torch.arange(0, 8), torch.arange(24, 27)])
    for whole, single in zip((k, v), kv_read(cache, slots), strict=True):
        assert torch.equal(whole.transpose(0, 1), single)


@pytest.mark.parametrize("label", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["hnd", "nhd"])
def test_a_label_on_the_buffer_means_nothing(kind: str, label: torch.dtype) -> None:
    """The same bytes as uint8 and as float8_e4m3fn, written and read; Gaudi 2's range through either."""
    for format, nearest in (("fp8_e4m3", 288.0), ("fp8_e4m3_240", 240.0)):
        layout = KVLayout(kind, format, 8, 1, 16, True)
        cache = PagedCache(layout.empty(1).buf.view(label), layout)
        k = torch.full((1, 1, 16), 300.0)
        kv_write(cache, k, k / 300, torch.tensor([3]))
        read_k, read_v = kv_read(cache, torch.tensor([3]))
        assert (read_k == nearest).all()
        assert (read_v == 1.0).all()


def test_fp8_equals_ml_dtypes() -> None:
    """x / scale rounded once, and back."""
    layout = KVLayout("hnd", "fp8_e4m3", 16, 2, 32, True)
    cache, slots, vectors = filled(layout, 2, 16)
    for read, given, scale in zip(kv_read(cache, slots), vectors, (K_SCALE, V_SCALE), strict=True):
        codes = (given.numpy() / scale.numpy()).astype(ml_dtypes.float8_e4m3fn)
        assert (read.numpy() == codes.astype(np.float32) * scale.numpy()).all()


def test_global_scales_multiply() -> None:
    """Reading the same bytes with twice the scale gives twice the numbers, for keys and values apart."""
    for kind, format in (("msa_slot", "nvfp4"), ("planar", "nvfp4"), ("hnd", "fp8_e4m3")):
        cache, slots, _ = filled(KVLayout(kind, format, 8, 2, 32, True), 1, 8)
        k, v = kv_read(cache, slots)
        k2, v4 = kv_read(PagedCache(cache.buf, cache.layout, K_SCALE * 2, V_SCALE * 4), slots)
        assert torch.equal(k2, k * 2)
        assert torch.equal(v4, v * 4)


def test_traits_of_writers() -> None:
    """Double rounding, an ignored fp8 scale and the reciprocal quantiser are emulated; a scale per token is refused."""
    x = torch.tensor([1.0625 + 2**-9] + [1.0] * 15).view(1, 1, 16)  # bf16 makes it E4M3's tie 1.0625, which goes to 1
    fp8 = KVLayout("hnd", "fp8_e4m3", 4, 1, 16, True)
    slot = torch.tensor([0])
    for traits, expected in (({}, 1.125), ({"double_rounding": "bfloat16"}, 1.0)):
        cache = fp8.empty(1)
        kv_write(cache, x, x, slot, traits=traits)
        assert kv_read(cache, slot)[0][0, 0, 0] == expected
    scaled = PagedCache(fp8.empty(1).buf, fp8, torch.tensor(2.0), torch.tensor(2.0))
    kv_write(scaled, x, x, slot, traits={"kv_scale_used": "no"})
    assert kv_read(scaled, slot)[0][0, 0, 1] == 2.0
    nvfp4 = KVLayout("msa_slot", "nvfp4", 4, 1, 16, True)
    cache = nvfp4.empty(1)
    kv_write(cache, x * 0, x, slot, traits={"nvfp4_quantizer": "reciprocal"})
    assert cache.buf[0, 0].flatten()[32] == 0  # the definition writes the smallest scale, 2**-9, for zeros
    with pytest.raises(ValueError, match="no quantiser with one per token"):
        kv_write(cache, x, x, slot, traits={"nvfp4_quantizer": "token_global"})


def test_what_no_cache_can_be() -> None:
    """Every wrong combination is a sentence when the layout is made, not garbage when it is read."""
    for arguments, sentence in (
        (("hnd", "nvfp4", 128, 4, 128, True), "nvfp4 pages are msa_slot or planar, not hnd"),
        (("msa_slot", "bfloat16", 128, 4, 128, True), "bfloat16 pages are hnd or nhd, not msa_slot"),
        (("msa_slot", "mxfp4", 128, 4, 128, True), "no cache holds mxfp4 values"),
        (("hnd", "mxfp8", 128, 4, 128, True), "no cache holds mxfp8;"),
        (("msa_slot", "nvfp4", 6, 4, 128, True), "hold a multiple of 4 tokens, not 6"),
        (("msa_slot", "nvfp4", 128, 4, 24, True), "24 don't fill groups"),
        (("hnd", "fp3", 128, 4, 128, True), "unknown format 'fp3'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            KVLayout(*arguments)
    plain, fp8 = KVLayout("hnd", "bfloat16", 4, 1, 16, True), KVLayout("hnd", "fp8_e4m3", 4, 1, 16, False)
    with pytest.raises(ValueError, match=r"a bfloat16 cache can't lie in a torch\.uint8 buffer"):
        PagedCache(torch.empty(1, 1, 4, 32, dtype=torch.uint8), plain)
    with pytest.raises(ValueError, match=r"a fp8_e4m3 cache can't lie in a torch\.bfloat16 buffer"):
        PagedCache(torch.empty(1, 1, 4, 16, dtype=torch.bfloat16), fp8)
    with pytest.raises(ValueError, match="an index cache has no global scale"):
        PagedCache(fp8.empty(1).buf, fp8, K_SCALE)
    with pytest.raises(ValueError, match="a bfloat16 cache has no global scale"):
        PagedCache(plain.empty(1).buf, plain, K_SCALE)


def test_a_slot_with_gaps_is_refused() -> None:
    """The inside of an nvfp4 slot is contiguous; a copy made silently would lose what is written to it."""
    layout = KVLayout("msa_slot", "nvfp4", 4, 1, 16, True)
    gappy = torch.zeros(2, 2, 4, 18, dtype=torch.uint8)[..., :9]
    with pytest.raises(ValueError, match="a slot of msa_slot is contiguous"):
        kv_write(PagedCache(gappy, layout), torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), torch.tensor([0]))
