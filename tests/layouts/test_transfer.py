"""Pages move between layouts and memories without a bit of them changing."""

from __future__ import annotations

import pytest
import torch
from m3hal_conformance.decoder import Page, decode_slot

from m3hal.layouts import CACHE_FORMATS, BlockRow, KVLayout, PagedCache, PagedRows, convert, pack, unpack
from m3hal.ops.kv_copy_blocks import kv_copy_blocks
from m3hal.ops.kv_read import kv_read
from m3hal.ops.kv_write import kv_write

EVERY = [(kind, format) for format, kinds in CACHE_FORMATS.items() for kind in kinds]


def layout_of(kind: str, format: str, page_size: int = 8) -> KVLayout:
    values = format != "mxfp4"
    return KVLayout(kind, format, page_size, 2 if values else 1, 32, values)


def noise(cache: PagedCache, seed: int = 1) -> PagedCache:
    """Every byte random: NaN of all kinds, infinities, -0."""
    raw = torch.randint(
        256, (cache.buf.numel() * cache.buf.element_size(),), generator=torch.Generator().manual_seed(seed)
    )
    cache.buf.copy_(raw.to(torch.uint8).view(cache.buf.dtype).view(cache.buf.shape))
    return cache


def raw(cache: PagedCache | PagedRows) -> torch.Tensor:
    return cache.buf.contiguous().view(torch.uint8).flatten(1)


@pytest.mark.parametrize(("kind", "format"), EVERY)
def test_blocks_are_copied_byte_for_byte(kind: str, format: str) -> None:
    """Every layout; source and destination of different strides; what no pair names keeps its bytes."""
    layout = layout_of(kind, format)
    src = noise(layout.empty(5))
    memory = torch.full((4, 3, *layout.page_shape()), 7, dtype=torch.uint8).to(layout.dtype)
    before = memory.clone()
    kv_copy_blocks(src, PagedCache(memory[:, 1], layout), torch.tensor([[4, 0], [1, 3], [-1, 2], [2, -1]]))
    assert torch.equal(raw(PagedCache(memory[:, 1], layout))[[0, 3]], raw(src)[[4, 1]])
    assert torch.equal(memory[1:3], before[1:3])
    assert torch.equal(memory[:, ::2], before[:, ::2])


@pytest.mark.parametrize(("kind", "format"), EVERY)
def test_packed_blocks_unpack_to_themselves(kind: str, format: str) -> None:
    """Blocks in any order, through contiguous rows, into other places of another cache."""
    layout = layout_of(kind, format)
    caches = [noise(layout.empty(6), seed) for seed in range(3)]
    others = [noise(layout.empty(4), seed + 9) for seed in range(3)]
    untouched = [raw(cache)[1].clone() for cache in others]
    rows = pack(caches, torch.tensor([5, 0, 3]))
    assert rows.buf.is_contiguous()
    unpack(rows, others, torch.tensor([2, 3, 0]))
    for cache, other, kept in zip(caches, others, untouched, strict=True):
        assert torch.equal(raw(other)[[2, 3, 0]], raw(cache)[[5, 0, 3]])
        assert torch.equal(raw(other)[1], kept)


@pytest.mark.parametrize(("kind", "format"), EVERY)
def test_conversion_keeps_every_number_and_every_byte(kind: str, format: str) -> None:
    """To each other page map and back; the decoder reads the same numbers from both, whatever the bytes are."""
    layout = layout_of(kind, format)
    cache = noise(layout.empty(2))
    slots = torch.arange(16)
    for other in CACHE_FORMATS[format]:
        moved = convert(cache, other)
        assert moved.layout.kind == other
        assert sorted(raw(moved)[0].tolist()) == sorted(raw(cache)[0].tolist())
        assert torch.equal(raw(convert(moved, layout.kind)), raw(cache))
        for before, after in zip(kv_read(cache, slots), kv_read(moved, slots), strict=True):
            assert before is after is None or torch.equal(before.nan_to_num(nan=0.5), after.nan_to_num(nan=0.5))
        theirs = [
            torch.from_numpy(
                decode_slot(c.buf.contiguous().view(torch.uint8).flatten().numpy(), Page.of(c.layout), 13, "k")
            )
            for c in (cache, moved)
        ]
        assert torch.equal(theirs[0].nan_to_num(nan=0.5), theirs[1].nan_to_num(nan=0.5))


def m3_caches() -> tuple[KVLayout, ...]:
    """One rank of M3 under TP4: 60 main caches of one head, 57 index caches, all NVFP4."""
    main = KVLayout("msa_slot", "nvfp4", 128, 1, 128, True)
    return (main,) * 60 + (KVLayout("msa_slot", "nvfp4", 128, 1, 128, False),) * 57


def test_one_block_of_all_layers_is_one_contiguous_row() -> None:
    """1,631,232 bytes at TP4 (177 pages of 9,216), moved by one pair; every layer's tokens arrive."""
    row = BlockRow(m3_caches())
    assert row.bytes == 60 * 18432 + 57 * 9216 == 177 * 9216 == 1_631_232
    rows, elsewhere = row.empty(3), row.empty(2)
    rows.buf.zero_()
    elsewhere.buf.zero_()
    assert rows.buf.stride() == (row.bytes, 1)
    slot = torch.tensor([2 * 128 + 77])
    for number, cache in enumerate(rows.caches):
        x = torch.full((1, 1, 128), float(number + 1))
        kv_write(cache, x, -x if cache.layout.has_values else None, slot)
    kv_copy_blocks(rows, elsewhere, torch.tensor([[2, 1]]))
    assert torch.equal(elsewhere.buf[1], rows.buf[2])
    assert elsewhere.buf[0].count_nonzero() == 0
    for number, cache in enumerate(elsewhere.caches):
        k, v = kv_read(cache, torch.tensor([128 + 77]))
        assert abs(float(k[0, 0, 5]) - (number + 1)) <= (number + 1) / 16
        assert v is None or torch.equal(v, -k)


def test_a_row_is_what_packing_makes() -> None:
    """Layer by layer or block-outer, the transferred bytes are the same, and so pages of 16-byte multiples only."""
    layouts = (
        layout_of("msa_slot", "nvfp4"),
        layout_of("hnd", "bfloat16"),
        KVLayout("hnd", "fp8_e4m3", 1, 1, 1, False),
    )
    with pytest.raises(ValueError, match="one page size, not 1, 8"):
        BlockRow(layouts)
    layouts = (*layouts[:2], KVLayout("hnd", "fp8_e4m3", 8, 1, 3, False), layouts[1])
    rows = BlockRow(layouts).empty(2)
    rows.buf.zero_()
    separate = []
    for cache in rows.caches:
        mine = noise(cache.layout.empty(2))
        kv_copy_blocks(mine, cache, torch.tensor([[0, 0], [1, 1]]))
        separate.append(mine)
    assert [offset % 16 for offset in rows.layout.offsets] == [0, 0, 0, 0]
    assert rows.layout.offsets[3] - rows.layout.offsets[2] == 32  # 24 bytes of page, 8 of padding
    assert torch.equal(pack(separate, torch.tensor([0, 1])).buf, rows.buf)


def test_labels_are_not_converted() -> None:
    """Bytes labelled float8 land unchanged in a uint8 buffer, and the other way round."""
    layout = layout_of("hnd", "fp8_e4m3")
    plain, labelled = noise(layout.empty(2)), layout.empty(2)
    labelled = PagedCache(labelled.buf.view(torch.float8_e4m3fn), layout)
    kv_copy_blocks(plain, labelled, torch.tensor([[0, 1], [1, 0]]))
    assert torch.equal(raw(labelled), raw(plain)[[1, 0]])
    target = layout.empty(2)
    unpack(pack([labelled], torch.tensor([0, 1])), [target], torch.tensor([0, 1]))
    assert torch.equal(raw(target), raw(labelled))


def test_rows_of_other_caches_are_refused() -> None:
    """Another page map, and an oracle's fp64 buffer that is no page of its layout."""
    rows = pack([layout_of("hnd", "bfloat16").empty(1)], torch.tensor([0]))
    with pytest.raises(ValueError, match="use convert first"):
        unpack(rows, [layout_of("nhd", "bfloat16").empty(1)], torch.tensor([0]))
    layout = layout_of("hnd", "float32")
    with pytest.raises(ValueError, match=r"the buffer is torch\.float64"):
        pack([PagedCache(layout.empty(1).buf.double(), layout)], torch.tensor([0]))
