"""The operators that read caches, over every format: they compute with what an independent decoder finds."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch
from m3hal_conformance.decoder import Page, decode_slot

from m3hal import ops
from m3hal.layouts import CACHE_FORMATS, KVLayout, PagedCache
from m3hal.ops import SeqMeta
from m3hal.ops.kv_write import kv_write

PAGE, DIM, HEADS, GROUPS = 8, 32, 4, 2
META = SeqMeta(
    cu_q=torch.tensor([0, 3, 4], dtype=torch.int32),
    seq_lens=torch.tensor([21, 9], dtype=torch.int32),
    block_table=torch.tensor([[3, 0, 5], [1, 4, -1]], dtype=torch.int32),
    max_q=3,
    max_k=24,
)
QUANTISED = [
    (kind, format) for format, kinds in CACHE_FORMATS.items() for kind in kinds if format not in ("float32", "float64")
]
K_SCALE, V_SCALE = torch.tensor(0.5), torch.tensor(0.3)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def caches(kind: str, format: str, *, index: bool) -> tuple[PagedCache, PagedCache]:
    """A quantised cache, and an fp32 cache of the numbers that the decoder finds in it."""
    heads = 1 if index else GROUPS
    layout = KVLayout(kind, format, PAGE, heads, DIM, not index)
    scaled = not index and format != "bfloat16"
    cache = PagedCache(layout.empty(6).buf, layout, *(K_SCALE, V_SCALE) if scaled else ())
    slots = torch.arange(6 * PAGE)
    k, v = randn(len(slots), heads, DIM, seed=1), randn(len(slots), heads, DIM, seed=2)
    kv_write(cache, k, None if index else v, slots)

    plain = KVLayout("hnd", "float32", PAGE, heads, DIM, not index).empty(6)
    raw = cache.buf.contiguous().view(torch.uint8).flatten().numpy()

    def decoded(part: str, scale: torch.Tensor | None) -> torch.Tensor:
        factor = 1.0 if scale is None else float(scale)
        found = [decode_slot(raw, Page.of(layout), slot, part, factor) for slot in slots.tolist()]
        return torch.from_numpy(np.stack(found)).float()

    kv_write(plain, decoded("k", cache.k_scale), None if index else decoded("v", cache.v_scale), slots)
    return cache, plain


def run(name: str, cache: PagedCache, **traits: str) -> torch.Tensor:
    """The operator's output over a cache."""
    q = randn(4, HEADS, DIM, seed=3)
    ids = torch.tensor([[0, 2], [0, 1]], dtype=torch.int32).expand(4, GROUPS, 2)
    reference = partial(ops.load(name).reference, **({"traits": traits} if traits else {}))
    if name == "block_scores":
        return reference(q, cache, META, block_size=PAGE)
    if name == "sparse_attention":
        return reference(q, cache, ids, META, scale=0.2, block_size=PAGE, return_lse=False)
    return reference(q, cache, META, scale=0.2, causal=True, window_left=-1, return_lse=False)


@pytest.mark.parametrize(
    ("name", "kind", "format"),
    [
        (name, kind, format)
        for name in ("block_scores", "sparse_attention", "paged_attention")
        for kind, format in QUANTISED
        if name == "block_scores" or format != "mxfp4"  # which holds index keys only
    ],
)
def test_the_numbers_are_those_of_the_decoder(name: str, kind: str, format: str) -> None:
    """Bit-identical to the same operator over an fp32 cache that holds what the decoder read."""
    cache, plain = caches(kind, format, index=name == "block_scores")
    assert torch.equal(run(name, cache), run(name, plain))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_products_rounded_to_e4m3_are_emulated(format: str) -> None:
    """Block scores with keys E4M3(code * scale) and queries E4M3(q), both by ml_dtypes."""
    cache, plain = caches("msa_slot", format, index=True)
    rounded = torch.from_numpy(plain.k.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert format == "mxfp4" or not torch.equal(rounded, plain.k)  # a power of two rounds nothing
    plain.k.copy_(rounded)
    assert torch.equal(run("block_scores", cache, kv_dequant_round="e4m3"), run("block_scores", plain))
    both = run("block_scores", cache, kv_dequant_round="e4m3", q_dtype="e4m3")
    assert torch.equal(both, run("block_scores", plain, q_dtype="e4m3"))
    assert not torch.equal(both, run("block_scores", plain))


def test_the_shift_keeps_large_scales_from_saturating() -> None:
    """Keys at the end of the range: the bare product is cut at 448, the shifted one is not."""
    layout = KVLayout("msa_slot", "nvfp4", PAGE, GROUPS, DIM, True)
    scale = torch.tensor(1 / 2688)
    cache = PagedCache(layout.empty(6).buf, layout, scale, scale)
    x = torch.ones(6 * PAGE, GROUPS, DIM)
    kv_write(cache, x, x, torch.arange(6 * PAGE))
    assert torch.allclose(run("paged_attention", cache), torch.tensor(1.0))
    shifted = run("paged_attention", cache, kv_dequant_round="e4m3_shift3")
    assert torch.allclose(shifted, torch.tensor(320 * 8 / 2688))  # 6 * 448 / 8 = 336 is a tie, 320 is even
    assert torch.allclose(run("paged_attention", cache, kv_dequant_round="e4m3"), torch.tensor(448 / 2688))


@pytest.mark.parametrize("name", ["block_scores", "sparse_attention", "paged_attention"])
@pytest.mark.parametrize("traits", [{"kv_dequant_round": "e4m3_shift3"}, {"q_dtype": "e4m3"}])
def test_each_rounding_shows(name: str, traits: dict[str, str]) -> None:
    """By a few percent, as measured for hardware that multiplies in FP8; never by nothing."""
    cache, _ = caches("msa_slot", "nvfp4", index=name == "block_scores")
    exact, rounded = run(name, cache), run(name, cache, **traits)
    seen = torch.isfinite(exact)
    error = (rounded - exact)[seen].norm() / exact[seen].norm()
    assert 1e-4 < error < 0.1


def test_stale_bytes_do_not_leak() -> None:
    """Pages outside the block table and tokens past the end hold NaN scales; nothing changes."""
    for name in ("block_scores", "paged_attention"):
        cache, _ = caches("msa_slot", "nvfp4", index=name == "block_scores")
        before = run(name, cache)
        cache.buf[2] = 0x7F
        slots = torch.tensor([5 * PAGE + 5, 4 * PAGE + 1])  # one past each request's end
        nan = PagedCache(torch.full_like(cache.buf, 0x7F), cache.layout)
        bytes_of = _places(cache, slots)
        cache.buf.view(-1)[bytes_of] = nan.buf.view(-1)[bytes_of]
        assert torch.equal(run(name, cache), before)


def _places(cache: PagedCache, slots: torch.Tensor) -> torch.Tensor:
    """bool over the flat buffer: the bytes that writing to these slots can change."""
    changed = torch.zeros(cache.buf.numel(), dtype=torch.bool)
    for fill in (0x00, 0xFF):
        scratch = PagedCache(torch.full_like(cache.buf, fill), cache.layout)
        for magnitude in (3.0, -5.0):
            x = torch.full((len(slots), cache.layout.heads, DIM), magnitude)
            kv_write(scratch, x, x if cache.layout.has_values else None, slots)
        changed |= scratch.buf.view(-1) != fill
    return changed


def test_fused_insertion_writes_quantised_caches() -> None:
    """qk_norm_rope_insert into NVFP4 and MXFP4 is its parts, and its bytes are kv_write's of the unrounded heads."""
    kv = KVLayout("msa_slot", "nvfp4", PAGE, 1, DIM, True)
    index = KVLayout("msa_slot", "mxfp4", PAGE, 1, DIM, False)
    norms = ops.QKNorms(*(randn(DIM, seed=seed) * 0.1 for seed in range(4)))
    row, positions, slots = randn(3, 6 * DIM, seed=8), torch.tensor([4, 0, 9]), torch.tensor([5, -1, 2])
    table = randn(10, DIM, seed=9)
    made = [(kv.empty(1), index.empty(1)) for _ in range(2)]
    for pair in made:
        for cache in pair:
            cache.buf.zero_()
    heads = {"num_q_heads": 2, "num_kv_heads": 1, "num_index_heads": 1, "head_dim": DIM, "index_dim": DIM}
    statics = {**heads, "rotary_dim": 16, "eps": 1e-6, "weight_offset": 1.0}
    fused = ops.load("qk_norm_rope_insert").reference
    fused(row, norms, positions, table[:, :16], *made[0], slots, slots, **statics)

    def head(place: int, weight: torch.Tensor) -> torch.Tensor:
        x = row[:, place * DIM : (place + 1) * DIM].view(3, 1, DIM)
        normed = ops.load("rms_norm").reference(x, weight, eps=1e-6, weight_offset=1.0)
        return ops.load("rope_partial").reference(normed, positions, table[:, :16], rotary_dim=16)

    kv_write(made[1][0], head(2, norms.k), row[:, 3 * DIM : 4 * DIM].view(3, 1, DIM), slots)
    kv_write(made[1][1], head(5, norms.index_k), None, slots)
    for ours, theirs in zip(*made, strict=True):
        assert torch.equal(ours.buf, theirs.buf)
        assert ours.buf.count_nonzero() > 0
