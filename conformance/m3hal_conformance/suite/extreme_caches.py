"""Caches where tests usually stop: thousands of slots, far pages, other page sizes, the ends of every format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal.layouts import PagedCache
from m3hal.layouts.stored import stored
from m3hal_conformance.case import MAX_TOKENS, Case, Inputs, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask
from m3hal_conformance.suite._paged import empty as empty_cache
from m3hal_conformance.suite._paged import index_layout, kv_layout
from m3hal_conformance.suite.extremes import OFTEN, Make, P
from m3hal_conformance.suite.kv_cache import _copy, _huge, _read, _write
from m3hal_conformance.suite.stored_caches import MAIN, SLOTS, _in_maps
from m3hal_conformance.suite.stored_caches import _write as _write_stored


def _runs() -> list[int]:
    """Slots of prompts: runs that end with a page and go on elsewhere; in some quads the middle is exchanged."""
    slots = [*range(100, 128), *range(5 * P, 5 * P + 60), *range(2 * P + 50, 3 * P), *range(0, 12)]
    for quad in range(0, len(slots) - 3, 12):
        slots[quad + 1], slots[quad + 2] = slots[quad + 2], slots[quad + 1]
    return slots


def _many_slots(pages: int) -> list[int]:
    return [(37 * n + 11) % (pages * P) for n in range(MAX_TOKENS)]


def _far_slots(rng: Rng, site: Site) -> Inputs:
    """Pages on both sides of the first whose offset leaves 31 bits; memory that nobody touches costs nothing."""
    layout = kv_layout(site)
    bad = 2**31 // (layout.page_size * layout.heads * layout.width)
    cache = PagedCache(torch.empty(bad + 2, *layout.page_shape(), dtype=dtype_of(site)), layout)
    slots = torch.tensor([0, bad - 1, bad, bad + 1]) * layout.page_size + torch.tensor([3, 127, 0, 5])
    for part in (cache.k, cache.v):
        part[slots // P, :, slots % P] = rng.normal(4, layout.heads, layout.dim).to(part.dtype)
    return {"cache": cache, "slots": torch.cat([slots, torch.tensor([-1])])}


def _hundred_pairs(index: bool) -> Make:
    """A hundred pages go to a hundred others."""

    def make(rng: Rng, site: Site) -> Inputs:
        layout = index_layout(site) if index else kv_layout(site)
        src, dst = empty_cache(layout, 110, rng), empty_cache(layout, 120, rng)
        src.buf.copy_(rng.integers(0, 100, *src.buf.shape).to(src.buf.dtype))
        pairs = torch.stack([rng.permutation(110)[:100], rng.permutation(120)[:100]], 1)
        return {"src": src, "dst": dst, "pairs": pairs}

    return make


def _caches() -> list[Case]:
    one: dict[str, Any] = {"kind": "sparse_attention", "tensor_parallel": 4}

    def hnd(make: Any) -> Make:
        return lambda rng, site: make(rng, site, "hnd")

    return [
        *ask("kv_write", "tokens_4096", hnd(_write(_many_slots(40), pages=41)), checks=LIGHT, bugs=("F68",), **one),
        *ask("kv_write", "prefill_runs", hnd(_write(_runs())), also=("permuted_rows",), bugs=("F60",), quick=True,
             **one),
        *ask("kv_write", "beyond_31_bits_one_head", hnd(_huge(index=False)), checks=("huge_pages",), lazy=("cache",),
             dtypes=("bfloat16",), bugs=("F63",), **one),
        *ask("kv_write", "draft_tree", hnd(_write([8, 10, 9, 11, 128, 130, 129, 131, 3 * P])), bugs=("F60",), **one),
        *ask("kv_write", "called_often", hnd(_write([5, 128, -1], pages=2)), **OFTEN, **one),
        *ask("kv_read", "tokens_4096", hnd(_read(_many_slots(6))), checks=LIGHT, bugs=("F68",), **one),
        *ask("kv_read", "page_16", hnd(_read([15, 16, 0, 40, -1, 95])), page_size=16, bugs=("F25",), quick=True, **one),
        *ask("kv_read", "page_64", hnd(_read([15, 64, 0, 63, -1, 300])), page_size=64, bugs=("F25",), **one),
        *[case for heads, name in ((4, "beyond_31_bits"), (1, "beyond_31_bits_one_head")) for case in ask(
            "kv_read", name, _far_slots, checks=("huge_slots_read",), dtypes=("bfloat16",), lazy=("cache",),
            bugs=("F63",), kind="sparse_attention", tensor_parallel=4 // heads)],
        *ask("kv_copy_blocks", "page_16", hnd(_copy([(3, 0), (0, 6), (-1, 2), (5, 5)])), page_size=16, bugs=("F25",),
             quick=True, **one),
        *ask("kv_copy_blocks", "pairs_100", _hundred_pairs(index=False), page_size=16, bugs=("F68",), **one),
        *ask("kv_copy_blocks", "index_pairs_100", _hundred_pairs(index=True), page_size=16, bugs=("F24", "F68"), **one),
        *ask("kv_copy_blocks", "index_page_64", hnd(_copy([(3, 0), (0, 6), (-1, 2), (5, 5)], index=True)), page_size=64,
             bugs=("F24", "F25"), **one),
        *ask("kv_copy_blocks", "ring_within_one_cache", hnd(_copy([(0, 1), (1, 2), (2, 0)], inside=True)), checks=LIGHT,
             **one),
    ]  # fmt: skip


def _ties(rng: Rng, x: Tensor) -> Tensor:
    """Whole and half steps of every format's codes in groups of 16: rounded to even, or wrong.

    Each group begins with 6 times a power of two, so that this power is the scale of a four-bit group.
    """
    step = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 1.0625])
    size = torch.exp2(rng.integers(-3, 4, *x.shape[:-1], x.shape[-1] // 16).float())
    return (step * size[..., None]).flatten(-2)


def _ties_of_the_format(rng: Rng, site: Site, kind: str) -> Inputs:
    """Numbers half-way between two codes once they are divided by the global scale, here a power of two.

    The largest values are beyond 240 and within 448.
    """
    inputs = _write_stored(SLOTS, _ties)(rng, site, kind)
    powers = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.125)}
    return {**inputs, "cache": replace(inputs["cache"], **powers)}


def _all_codes(rng: Rng, site: Site, kind: str) -> Inputs:
    """Every byte that is no NaN, as a code; scales from the whole of their range, the largest and smallest too."""
    layout = kv_layout(site, kind)
    cache = empty_cache(layout, 2, rng)
    highest = 0x79 if site.kv_format == "fp8_e4m3_240" else 0x7F
    cache.buf.copy_((torch.arange(cache.buf.numel()) % highest).view(cache.buf.shape))
    cache.buf.bitwise_or_(rng.integers(0, 2, *cache.buf.shape).to(torch.uint8) << 7)
    for part in ("k", "v") if layout.spec.group else ():
        scales = stored(cache, part).scales
        assert scales is not None
        scales.copy_(rng.integers(0, 0x7F, *scales.shape))
    return {"cache": cache, "slots": torch.arange(2 * P)}


def _stored_caches() -> list[Case]:
    two: dict[str, Any] = {"tensor_parallel": 2, "quick": True}
    return [
        *_in_maps("kv_write", "exact_ties", _ties_of_the_format, MAIN, bugs=("F56", "F73"), **two),
        *_in_maps(
            "kv_write",
            "beyond_the_range",
            _write_stored(SLOTS, lambda rng, x: 600 * x),
            MAIN,
            bugs=("F56",),
            also=("permuted_rows",),
            **two,
        ),
        *_in_maps("kv_read", "all_codes", _all_codes, MAIN, bugs=("F56",), also=("permuted_rows",), **two),
    ]


CASES = [*_caches(), *_stored_caches()]
