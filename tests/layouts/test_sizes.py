"""What a token costs in the caches of MiniMax-M3: the published numbers come out of the layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from m3hal.layouts import CACHE_FORMATS, KVLayout, page_map
from m3hal.layouts.sizes import bytes_per_token, index_caches, main_caches
from m3hal.shape import MINIMAX_M3, ModelShape


def m3(format: str, tensor_parallel: int = 1) -> ModelShape:
    return ModelShape.from_config(
        MINIMAX_M3,
        dtype="bfloat16",
        page_size=128,
        max_tokens=1,
        max_seqs=1,
        max_context=1,
        tensor_parallel=tensor_parallel,
        kv_format=format,
        index_format=format,
    )


@pytest.mark.parametrize(
    ("format", "main", "index"),
    [
        ("nvfp4", 34_560, 57 * 72),
        ("fp8_e4m3", 61_440, 57 * 128),
        ("bfloat16", 122_880, 14_592),
        ("float32", 245_760, 29_184),
    ],
)
def test_bytes_per_token(format: str, main: int, index: int) -> None:
    """60 layers of keys and values, 57 of index keys, the same in every page map of the format."""
    for kind in CACHE_FORMATS[format]:
        assert bytes_per_token(main_caches(m3(format), kind)) == main
        assert bytes_per_token(index_caches(m3(format), kind)) == index


def test_nvfp4_saves_43_75_percent_over_fp8() -> None:
    """Of the main cache, of the index cache, and so of both."""
    for caches in (main_caches, index_caches):
        assert 1 - bytes_per_token(caches(m3("nvfp4"))) / bytes_per_token(caches(m3("fp8_e4m3"))) == 0.4375


def test_the_indexer_reads_an_eighth_in_fp8() -> None:
    """128 bytes of index key against 1,024 of keys and values, for each token and layer."""
    main, index = main_caches(m3("fp8_e4m3"))[0], index_caches(m3("fp8_e4m3"))[0]
    assert (index.bytes_per_token(), main.bytes_per_token()) == (128, 1024)


def test_mxfp4_index_keys() -> None:
    """68 bytes: 64 of codes, 4 scales."""
    assert KVLayout("msa_slot", "mxfp4", 128, 1, 128, False).bytes_per_token() == 68


def test_ranks_share_the_heads_and_each_holds_the_index() -> None:
    """Under TP4 one head of four; under TP8 a copy of it; index keys are never divided."""
    assert bytes_per_token(main_caches(m3("nvfp4", 4))) == 34_560 // 4
    assert bytes_per_token(main_caches(m3("nvfp4", 8))) == 34_560 // 4
    assert bytes_per_token(index_caches(m3("nvfp4", 8))) == 4_104


def test_the_drafter_is_apart() -> None:
    """Six layers of eight heads in FP8 take 12,288 bytes per token, which no published figure contains."""
    drafter = (KVLayout("hnd", "fp8_e4m3", 128, 8, 128, True),) * 6
    assert bytes_per_token(drafter) == 12_288


def test_one_layout_of_a_plan_names_the_page_maps_of_a_layer() -> None:
    """Each cache takes it where its format has it, else its format's own first."""
    assert (page_map("nvfp4", "planar"), page_map("bfloat16", "planar")) == ("planar", "hnd")
    assert (page_map("fp8_e4m3", "nhd"), page_map("mxfp4", "nhd")) == ("nhd", "msa_slot")
    shape = replace(m3("nvfp4"), index_format="bfloat16")
    assert {cache.kind for cache in main_caches(shape, "planar")} == {"planar"}
    assert {cache.kind for cache in index_caches(shape, "planar")} == {"hnd"}
