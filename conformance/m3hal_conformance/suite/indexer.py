"""``block_scores`` and ``select_blocks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from m3hal_conformance.case import Case, Inputs, Rng, Site, dtype_of
from m3hal_conformance.inputs import index_inputs
from m3hal_conformance.suite._build import LIGHT, ask, in_wide_row
from m3hal_conformance.suite._paged import Lengths, filled, in_huge_cache, index_layout, requests, with_strays

BOTH = ("hnd", "nhd")
#: decode and chunked prefill, around page boundaries; one padded request, one without queries
MIXED: Lengths = [(1, 1), (1, 127), (4, 128), (1, 129), (3, 300), (1, 0), (0, 200), (5, 1921), (1, 2048), (2, 2177)]
RELATIONS = ("stale", "permuted_pages", "permuted_requests", "row_alone")


def _needles(lengths: Lengths, *, outer: int = 1, max_k: int = 0) -> Callable[..., Inputs]:
    """One key decides each block; the rest of the cache, and what pages hold past the end, is stale."""

    def make(rng: Rng, site: Site, kind: str = "hnd") -> Inputs:
        held = requests(rng, lengths, site.page_size, max_k=max_k)
        index_q, keys = index_inputs(held, site.num_index_heads, site.index_dim, site.block_size, rng.generator)
        if site.dtype == "float32":
            index_q = index_q * (1 + 1e-3 * rng.normal(*index_q.shape))
            keys = [k * (1 + 1e-3 * rng.normal(*k.shape)) for k in keys]
        index_q[held.meta.positions(held.tokens) < 0] = float("nan")
        cache = filled(held, index_layout(site, kind), keys, None, rng, outer)
        return {"index_q": index_q.to(dtype_of(site)), "index_cache": cache, "meta": held.meta}

    return make


def _with(lengths: Lengths, edit: Any, **options: Any) -> Callable[..., Inputs]:
    """Index inputs whose queries and keys ``edit(rng, index_q, keys)`` replaces before they are stored."""

    def make(rng: Rng, site: Site, kind: str = "hnd") -> Inputs:
        held = requests(rng, lengths, site.page_size, **options)
        shape = (held.tokens, site.num_index_heads, site.index_dim)
        keys = [rng.normal(length, 1, site.index_dim) for _, length in lengths]
        index_q, keys = edit(rng, rng.normal(*shape), keys)
        cache = filled(held, index_layout(site, kind), keys, None, rng)
        return {"index_q": index_q.to(dtype_of(site)), "index_cache": cache, "meta": held.meta}

    return make


def _all_negative(rng: Rng, q: Tensor, keys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Every product is below zero: an accumulator or a padding of zero would win."""
    keys = [rng.uniform(0.5, 1.5, *k.shape) for k in keys]
    for k in keys:
        k[3 * 128 : 4 * 128] *= 0.1
    return torch.full_like(q, -1 / 128), keys


def _ramp(rng: Rng, q: Tensor, keys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The score of a block is the position of its last visible key, so that an off-by-one in either end shows."""
    unit = torch.zeros_like(q)
    unit[..., 0] = 1
    for k in keys:
        k.zero_()
        k[:, 0, 0] = torch.arange(1, len(k) + 1) / 2304
    return unit, keys


def _last_dimensions(rng: Rng, q: Tensor, keys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The energy of queries and keys lies in the last eight of 128 dimensions."""
    for t in (q, *keys):
        t[..., :-8] *= 0.02
    return q, keys


def _walking(rng: Rng, q: Tensor, keys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """In block b the best key stands at offset 7 b mod 128, and every other key is far worse."""
    unit = torch.zeros_like(q)
    unit[..., 5] = 1 + 0.1 * rng.uniform(0, 1, *q.shape[:-1])
    for k in keys:
        k.mul_(0.01)
        k[..., 5] = -3
        for block, start in enumerate(range(0, len(k), 128)):
            k[min(start + 7 * block % 128, len(k) - 1), 0, 5] = 1 + 0.03 * block
    return unit, keys


def _visible_nan(rng: Rng, q: Tensor, keys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    for k in keys:
        k[130:131] = float("nan")
    return q, keys


def _heads_differ(rng: Rng, q: Tensor, keys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Each index head asks for a block of its own: a maximum over heads loses all but one."""
    for k in keys:
        k.mul_(0.01)
        for block in range(-(-len(k) // 128)):
            k[block * 128, 0, block % 8 * 16] = 4 + 0.25 * block
    q = 0.01 * q
    for head in range(q.shape[1]):
        q[:, head, head * 16] = 1
    return q, keys


def _shared_pages(rng: Rng, site: Site) -> Inputs:
    """The second request has its first ten pages from the first: a prefix-cache hit."""
    inputs = _needles([(2, 1400), (3, 1700)])(rng, site)
    inputs["meta"].block_table[1, :10] = inputs["meta"].block_table[0, :10]
    return inputs


def _fused_row(rng: Rng, site: Site) -> Inputs:
    inputs = _needles([(3, 300), (1, 129)])(rng, site)
    flat = in_wide_row(inputs["index_q"].flatten(1), 256, 128)
    return {**inputs, "index_q": flat.unflatten(1, inputs["index_q"].shape[1:])}  # type: ignore[no-untyped-call]


def _both(op: str, name: str, make: Any, **options: Any) -> list[Case]:
    cases: list[Case] = []
    for layout in BOTH:
        bound = lambda rng, site, make=make, layout=layout: make(rng, site, layout)  # noqa: E731
        cases += ask(op, name, bound, kind="sparse_attention", layouts=(layout,), **options)
    return cases


def _ramp_scores(inputs: Inputs) -> Mapping[str, Tensor]:
    """What the ramp's scores must be, from positions alone: (last visible position of the block + 1) / 2304."""
    position = inputs["meta"].positions(len(inputs["index_q"]))
    end = (torch.arange(-(-inputs["meta"].max_k // 128)) + 1) * 128
    seen = torch.minimum(end, (position + 1)[:, None]).double() / 2304
    hidden = end - 128 > position[:, None]
    heads = inputs["index_q"].shape[1]
    return {"out": seen.masked_fill(hidden, float("-inf"))[:, None].expand(-1, heads, -1)}


def _scores() -> list[Case]:
    op = "block_scores"

    def q(name: str, make: Any, **options: Any) -> list[Case]:
        return ask(op, name, make, kind="sparse_attention", **options)

    last_block = [(1, 128 * k + d) for k in (1, 2, 15, 16) for d in (-1, 0, 1)]
    return [
        *_both(op, "mixed", _needles(MIXED), also=RELATIONS, input_class="needles", quick=True,
               bugs=("F20", "F21", "F12")),
        *_both(op, "block_outer", _needles(MIXED[:5], outer=2), input_class="needles", bugs=("F64",), quick=True),
        *q("page_boundaries", _needles(last_block), input_class="needles", bugs=("F12", "F19"), quick=True),
        *q("chunks", _needles([(24, 700), (9, 140)]), also=("chunked",), input_class="needles", bugs=("F23", "F22"),
           quick=True),
        *q("chunk_inside_block", _needles([(100, 200)]), checks=(*LIGHT, "chunked"), input_class="needles",
           bugs=("F22",)),
        *q("context_4k", _needles([(1, 4096), (2, 4000)]), checks=LIGHT, input_class="needles", bugs=("F15",)),
        *q("all_negative", _with([(1, 2500), (2, 700)], _all_negative), bugs=("F17",), input_class="positive",
           quick=True,
           also=("stale",)),
        *q("ramp", _with([(3, 2053), (1, 2176), (2, 129)], _ramp, max_k=2304), bugs=("F20", "F23"), input_class="ramp",
           golden=_ramp_scores, also=("stale",), quick=True),
        *q("walking_needle", _with([(2, 2304), (1, 1000)], _walking), input_class="positive", quick=True),
        *q("last_dimensions", _with([(2, 700)], _last_dimensions), input_class="needles", quick=True),
        *q("visible_nan", _with([(2, 700), (1, 100)], _visible_nan), input_class="needles", quick=True),
        *q("heads_differ", _with([(4, 1024)], _heads_differ), input_class="ramp", bugs=("F16",), quick=True),
        *q("tokens_equal_heads", _needles([(4, 520)]), input_class="needles", quick=True),
        *q("wide_bound", _needles([(1, 200), (1, 129)], max_k=2048), input_class="needles", also=("stale",),
           bugs=("F18",)),
        *q("bound_too_small", _needles([(1, 2048)]), checks=("host_bound",), input_class="needles", bugs=("F18",),
           quick=True),
        *q("shared_pages", _shared_pages, input_class="needles", bugs=("F21",)),
        *q("tp4", _needles(MIXED[2:6]), tensor_parallel=4, input_class="needles", bugs=("F67",)),
        *q("dim_64", _needles([(2, 300)]), index_dim=64, input_class="needles", bugs=("F69",)),
        *q("page_64", _needles([(2, 300), (1, 129)]), page_size=64, input_class="needles", bugs=("F25",)),
        *q("page_256", _needles([(2, 300), (1, 129)]), page_size=256, input_class="needles", bugs=("F25",)),
        *q("fused_row", _fused_row, input_class="needles", bugs=("F65",), quick=True),
        *q("batch_64", _needles([(1, 100 + 7 * n) for n in range(64)]), checks=LIGHT, input_class="needles"),
        *q("stray_tokens", lambda r, s: with_strays(_needles([(2, 300), (1, 129)])(r, s)), input_class="needles",
           bugs=("F14",), quick=True),
        *q("beyond_31_bits", _huge, checks=("huge_pages_read",), dtypes=("bfloat16",), lazy=("index_cache",),
           input_class="needles", bugs=("F63",)),
        *q("padded_only", _needles([(1, 0), (2, 0)], max_k=256), bugs=("F14", "F30"), quick=True),
        *q("no_token", _needles([(0, 128)]), bugs=("F30",), quick=True),
    ]  # fmt: skip


def _huge(rng: Rng, site: Site) -> Inputs:
    inputs = _needles([(1, 700), (2, 300)])(rng, site)
    cache, meta = in_huge_cache(inputs["index_cache"], inputs["meta"])
    return {**inputs, "index_cache": cache, "meta": meta}


def _equal_keys(rng: Rng, q: Tensor, keys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return torch.ones_like(q), [torch.ones_like(k) for k in keys]


def _select() -> list[Case]:
    op = "select_blocks"

    def q(name: str, make: Any, **options: Any) -> list[Case]:
        return ask(op, name, make, kind="sparse_attention", **options)

    long: Lengths = [(1, 2049), (2, 2500), (3, 3000), (1, 4096), (1, 1), (1, 0), (4, 2177)]
    return [
        *_both(op, "long", _needles(long), also=RELATIONS, input_class="needles", quick=True,
               bugs=("F20", "F21", "F12")),
        *q("around_2048", _needles([(1, 1), (1, 127), (1, 128), (1, 129), (1, 2047), (1, 2048), (1, 2049)]),
           input_class="needles", bugs=("F12",), also=("stale",), quick=True),
        *q("chunks", _needles([(20, 2600)]), also=("chunked",), input_class="needles", bugs=("F23",), quick=True),
        *q("all_equal", _with([(1, 64 * 64)], _equal_keys), bugs=("F16",), input_class="ramp", quick=True),
        *q("all_negative", _with([(1, 2560), (1, 2600)], _all_negative), bugs=("F17",), input_class="positive",
           quick=True, also=("row_alone",)),
        *q("heads_differ", _with([(4, 4096)], _heads_differ), input_class="ramp", quick=True),
        *q("ramp", _with([(2, 2181)], _ramp), input_class="ramp", also=("stale",), bugs=("F20",), quick=True),
        *q("tokens_equal_heads", _needles([(4, 3000)]), input_class="needles", quick=True),
        *q("nothing_forced", _needles([(3, 4000), (1, 2181), (2, 3500)]), local_blocks=0, input_class="needles",
           also=("stale",),
           bugs=("F20",), quick=True),
        *q("init_1_local_2", _needles([(2, 3000), (1, 200)]), init_blocks=1, local_blocks=2, input_class="needles"),
        *q("shared_pages", _shared_pages, input_class="needles", bugs=("F21",)),
        *q("chunk_130", _needles([(130, 2600), (3, 300)]), checks=(*LIGHT, "permuted_requests"), bugs=("F68",),
           input_class="needles"),
        *q("stray_tokens", lambda r, s: with_strays(_needles([(2, 2500), (1, 129)])(r, s)), input_class="needles",
           bugs=("F14",), quick=True),
        *q("page_64", _needles([(2, 2500)]), page_size=64, input_class="needles", bugs=("F25",)),
        *q("tp4", _needles(long[:3]), tensor_parallel=4, input_class="needles", bugs=("F67",)),
        *q("bound_too_small", _needles([(1, 4096), (2, 2177)]), checks=("host_bound",), input_class="needles",
           bugs=("F18",), quick=True),
        *q("padded_only", _needles([(1, 0), (1, 0)], max_k=256), bugs=("F14", "F30"), quick=True),
        *q("no_token", _needles([(0, 128)]), bugs=("F30",), quick=True),
    ]  # fmt: skip


CASES = [*_scores(), *_select()]
