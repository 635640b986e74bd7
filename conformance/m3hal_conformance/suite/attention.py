"""``sparse_attention`` and ``paged_attention``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal_conformance.case import Case, Inputs, Make, Rng, Site, dtype_of
from m3hal_conformance.inputs import Batch
from m3hal_conformance.suite._build import LIGHT, ask, every_other, in_wide_row
from m3hal_conformance.suite._paged import (
    Lengths,
    block_inputs,
    choose,
    filled,
    in_huge_cache,
    kv_layout,
    requests,
    with_strays,
)

BOTH = ("hnd", "nhd")
DECODE: Lengths = [(1, 1), (1, 127), (1, 128), (1, 129), (1, 300), (1, 0), (1, 1500), (0, 50)]
RAGGED: Lengths = [(5, 5), (3, 130), (1, 257), (2, 0), (7, 640)]
RELATIONS = ("stale", "permuted_pages", "permuted_requests", "row_alone")
Ids = Callable[[Rng, Batch, Site], Tensor]


def _every_block(rng: Rng, held: Batch, site: Site) -> Tensor:
    return choose(rng, held, site)


def _few(rng: Rng, held: Batch, site: Site) -> Tensor:
    return choose(rng, held, site, count=4)


def _newest_only(rng: Rng, held: Batch, site: Site) -> Tensor:
    ids = choose(rng, held, site, count=1)
    position = held.meta.positions(held.tokens)
    ids[..., 0] = torch.where(position < 0, -1, position // site.block_size).int()[:, None]
    ids[..., 1:] = -1
    return ids


def _nothing(rng: Rng, held: Batch, site: Site) -> Tensor:
    ids = _few(rng, held, site)
    ids[::2] = -1
    return ids


def _with_future(rng: Rng, held: Batch, site: Site) -> Tensor:
    """Ids past the query's own block, in part past the block table, stand after the valid ones: they select nothing."""
    ids = _few(rng, held, site)
    newest = held.meta.positions(held.tokens) // site.block_size
    tail = torch.arange(1, 5) * torch.arange(1, 5)
    ids[..., -4:] = (newest[:, None, None] + tail).int()
    return ids


def _inputs(lengths: Lengths, ids: Ids | None, *, outer: int = 1, max_k: int = 0) -> Callable[..., Inputs]:
    def make(rng: Rng, site: Site, kind: str = "hnd") -> Inputs:
        held = requests(rng, lengths, site.page_size, max_k=max_k)
        found = block_inputs(rng, site, held)
        kv = filled(held, kv_layout(site, kind), found.keys, found.values, rng, outer)
        chosen = {} if ids is None else {"block_ids": ids(rng, held, site)}
        return {"q": found.q, "kv": kv, **chosen, "meta": held.meta}

    return make


def _edited(
    lengths: Lengths, ids: Ids | None, edit: Callable[[Rng, Tensor, list[Tensor], list[Tensor]], Any]
) -> Callable[..., Inputs]:
    """Attention inputs whose q, keys and values ``edit`` makes."""

    def make(rng: Rng, site: Site, kind: str = "hnd") -> Inputs:
        held = requests(rng, lengths, site.page_size)
        found = block_inputs(rng, site, held)
        q, keys, values = edit(rng, found.q.float(), found.keys, found.values)
        kv = filled(held, kv_layout(site, kind), keys, values, rng)
        chosen = {} if ids is None else {"block_ids": ids(rng, held, site)}
        return {"q": q.to(dtype_of(site)), "kv": kv, **chosen, "meta": held.meta}

    return make


def _flat(rng: Rng, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Any:
    """All keys equal: every visible key weighs the same, so a lost or doubled one shows in the sum's last digits."""
    return q, [torch.zeros_like(k) for k in keys], [v + 1 for v in values]


def _needle(rng: Rng, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Any:
    """Every eleventh key stands out for its own query direction and carries a value that nothing else has."""
    direction = torch.nn.functional.normalize(rng.normal(q.shape[-1]), dim=0)
    q = q + (30 * direction)
    for k, v in zip(keys, values, strict=True):
        k.mul_(0.1)
        k[::11] += direction * rng.uniform(0.8, 1.2, len(k[::11]), 1, 1)
        v[::11] += 5 * rng.normal(*v[::11].shape)
    return q, keys, values


def _large_logits(rng: Rng, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Any:
    """Scores of some hundreds, in part all far below zero: a softmax without its maximum overflows or vanishes."""
    direction = torch.nn.functional.normalize(rng.normal(q.shape[-1]), dim=0)
    sign = torch.where(torch.arange(len(q)) % 2 == 0, 1.0, -1.0)[:, None, None]
    return q + 200 * sign * direction, [k + 20 * direction for k in keys], values


def _groups_apart(rng: Rng, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Any:
    """Each kv head has one constant value: a query head that reads the wrong one shows at once."""
    heads = values[0].shape[1]
    constant = (torch.arange(heads) + 1.0)[:, None]
    return q, keys, [torch.ones_like(v) * constant for v in values]


def _equal_in_reach(rng: Rng, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Any:
    """The last visible key, and the first of the context, hold values that no other key has."""
    for k, v in zip(keys, values, strict=True):
        k.zero_()
        v[-1:] += 40
        v[:1] -= 40
    return q, keys, values


def _blocks_cancel(rng: Rng, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Any:
    """Keys of equal weight; the second block's first value takes away what the first block's adds to every sum.

    What is left is a tenth of either block's result: where results were rounded to bf16, some digits too few.
    """
    for k, v in zip(keys, values, strict=True):
        k.zero_()
        v[:1] -= 80
        v[128:129] += 80
    return q, keys, values


def _visible_nan(rng: Rng, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Any:
    """A NaN value in the first request, and a NaN query in the last token: their rows alone are NaN."""
    values[-1][2, 0, 5] = float("nan")
    q[0, 1] = float("nan")
    return q, keys, values


def _shared_pages(ids: Ids | None) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        inputs = _inputs([(2, 400), (3, 700)], ids)(rng, site)
        inputs["meta"].block_table[1, :3] = inputs["meta"].block_table[0, :3]
        return inputs

    return make


def _fused_row(ids: Ids | None) -> Make:
    """q as a slice of the projection's row."""

    def make(rng: Rng, site: Site) -> Inputs:
        inputs = _inputs(RAGGED, ids)(rng, site)
        flat = in_wide_row(inputs["q"].flatten(1), 0, 640)
        return {**inputs, "q": flat.unflatten(1, inputs["q"].shape[1:])}  # type: ignore[no-untyped-call]

    return make


def _huge(ids: Ids | None) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        inputs = _inputs([(1, 700), (2, 300)], ids)(rng, site)
        kv, meta = in_huge_cache(inputs["kv"], inputs["meta"])
        return {**inputs, "kv": kv, "meta": meta}

    return make


def _strided_ids(rng: Rng, site: Site) -> Inputs:
    inputs = _inputs(RAGGED, _few)(rng, site)
    return {**inputs, "block_ids": inputs["block_ids"].transpose(0, 1).contiguous().transpose(0, 1)}


def _strided_cache(rng: Rng, site: Site) -> Inputs:
    inputs = _inputs(RAGGED, _few)(rng, site)
    return {**inputs, "kv": replace(inputs["kv"], buf=in_wide_row(inputs["kv"].buf, 8, 24))}


def _spread_table(ids: Ids | None) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        inputs = _inputs(RAGGED, ids)(rng, site)
        meta = inputs["meta"]
        return {**inputs, "meta": replace(meta, block_table=every_other(meta.block_table, 0))}

    return make


def _both(op: str, name: str, make: Any, *, kind: str, **options: Any) -> list[Case]:
    cases: list[Case] = []
    for layout in BOTH:
        bound = lambda rng, site, make=make, layout=layout: make(rng, site, layout)  # noqa: E731
        cases += ask(op, name, bound, kind=kind, layouts=(layout,), return_lse=True, **options)
    return cases


def _sparse() -> list[Case]:
    op = "sparse_attention"

    def q(name: str, make: Any, **options: Any) -> list[Case]:
        options = {"return_lse": True, "tensor_parallel": 2, **options}
        return ask(op, name, make, kind="sparse_attention", **options)

    boundary = [(1, 128 * k + d) for k in (1, 2, 3) for d in (-1, 0, 1)]
    long: Lengths = [(1, 2049), (1, 3000), (2, 4096), (1, 2500)]
    return [
        *_both(op, "decode", _inputs(DECODE, _every_block), kind="sparse_attention", quick=True, tensor_parallel=2,
               also=RELATIONS, bugs=("F19", "F21", "F14", "F13", "F34", "F69"), input_class="blocks"),
        *_both(op, "ragged", _inputs(RAGGED, _few), kind="sparse_attention", quick=True, tensor_parallel=2,
               also=RELATIONS, bugs=("F21", "F13"), input_class="blocks"),
        *_both(op, "block_outer", _inputs(RAGGED, _few, outer=3), kind="sparse_attention", tensor_parallel=2,
               bugs=("F64",), input_class="blocks", quick=True),
        *q("all_heads", _inputs([(1, 300), (2, 130)], _few), tensor_parallel=1, input_class="blocks", bugs=("F67",)),
        *q("tp8", _inputs(RAGGED, _few), tensor_parallel=8, input_class="blocks", bugs=("F67",)),
        *q("long", _inputs(long, _every_block), input_class="blocks", also=("stale",), bugs=("F21",), quick=True),
        *q("dense_when_short", _inputs([(4, 2048), (3, 1000), (1, 129)], _every_block), checks=(*LIGHT, "dense"),
           input_class="blocks", bugs=("F12",), quick=True),
        *q("page_boundaries", _inputs(boundary, _every_block), input_class="blocks", bugs=("F19",), also=("stale",),
           quick=True),
        *q("chunks", _inputs([(24, 600), (9, 140)], _few), also=("chunked",), input_class="blocks", bugs=("F22",),
           quick=True),
        *q("chunk_130", _inputs([(130, 1500), (3, 300)], _few), checks=LIGHT, input_class="blocks", bugs=("F68",)),
        *q("newest_only", _inputs(RAGGED, _newest_only), input_class="blocks", bugs=("F13",), quick=True),
        *q("empty_rows", _inputs(RAGGED, _nothing), input_class="blocks", bugs=("F14", "F13"), quick=True),
        *q("few_of_many", _inputs(long, _few), input_class="blocks", bugs=("F13",), quick=True),
        *q("ids_past_the_end", _inputs([(1, 2600), *RAGGED], _with_future), input_class="blocks", bugs=("F13",),
           quick=True, also=("stale",)),
        *q("groups_apart", _edited(RAGGED, _few, _groups_apart), tensor_parallel=1, input_class="flat", bugs=("F67",),
           quick=True),
        *q("flat", _edited([(2, 1000), (1, 300)], _every_block, _flat), input_class="flat", quick=True),
        *q("needle", _edited([(2, 1000), (1, 300)], _every_block, _needle), input_class="needle", quick=True),
        *q("ends", _edited([(1, 385), (2, 300)], _every_block, _equal_in_reach), input_class="flat", quick=True,
           bugs=("F19",)),
        *q("blocks_cancel", _edited([(9, 300), (1, 257), (24, 385), (2, 140)], _every_block, _blocks_cancel),
           input_class="cancelling", quick=True, bugs=("F19",)),
        *q("chunk_ends", _edited([(16, 385), (10, 300)], _every_block, _equal_in_reach), input_class="cancelling",
           return_lse=False, quick=True, bugs=("F19",)),
        *q("large_logits", _edited(RAGGED, _few, _large_logits), input_class="large", quick=True),
        *q("visible_nan", _edited([(2, 300), (3, 200)], _every_block, _visible_nan), input_class="blocks", quick=True,
           bugs=("F28",)),
        *q("q_len_16", _inputs([(16, 400), (16, 16)], _few), input_class="blocks"),
        *q("tokens_equal_heads", _inputs([(2, 300)], _few), input_class="blocks"),
        *q("shared_pages", _shared_pages(_few), input_class="blocks", bugs=("F21",)),
        *q("fused_row", _fused_row(_few), input_class="blocks", bugs=("F65",), quick=True),
        *q("head_major_ids", _strided_ids, input_class="blocks", bugs=("F08",), quick=True),
        *q("strided_cache", _strided_cache, input_class="blocks", bugs=("F64",), quick=True),
        *q("spread_table", _spread_table(_few), input_class="blocks", bugs=("F64",)),
        *q("without_lse", _inputs(RAGGED, _few), return_lse=False, input_class="blocks", quick=True),
        *q("other_scale", _inputs(RAGGED, _few), scale=0.05, input_class="blocks", bugs=("F04",)),
        *q("wide_bound", _inputs([(1, 200), (1, 129)], _few, max_k=2048), input_class="blocks", bugs=("F18",)),
        *q("page_64", _inputs([(2, 300), (1, 129)], _few), page_size=64, input_class="blocks", bugs=("F25",)),
        *q("page_256", _inputs([(2, 300), (1, 129)], _few), page_size=256, input_class="blocks", bugs=("F25",)),
        *q("batch_64", _inputs([(1, 60 + 9 * n) for n in range(64)], _few), checks=LIGHT, input_class="blocks"),
        *q("stray_tokens", lambda r, s: with_strays(_inputs(RAGGED, _few)(r, s)), input_class="blocks", bugs=("F14",),
           quick=True),
        *q("beyond_31_bits", _huge(_few), checks=("huge_pages_read",), dtypes=("bfloat16",), lazy=("kv",),
           input_class="blocks", bugs=("F63",)),
        *q("bound_too_small", _inputs([(1, 2048), (2, 700)], _few), checks=("host_bound",), input_class="blocks",
           bugs=("F18",), quick=True),
        *q("bound_of_a_chunk", _inputs([(4, 130), (1, 300)], _few), checks=("host_bound",), input_class="blocks",
           bugs=("F18",), quick=True),
        *q("padded_only", _inputs([(1, 0), (2, 0)], _few, max_k=128), input_class="blocks", bugs=("F14", "F30"),
           quick=True),
        *q("no_token", _inputs([(0, 128)], _few), bugs=("F30",), quick=True, input_class="blocks"),
    ]  # fmt: skip


def _paged() -> list[Case]:
    op = "paged_attention"

    def q(name: str, make: Any, **options: Any) -> list[Case]:
        options = {"return_lse": True, "kind": "dense_attention", "tensor_parallel": 2, **options}
        return ask(op, name, make, **options)

    drafts: Lengths = [(8, 8), (8, 700), (8, 1033), (1, 0), (8, 1500)]
    return [
        *_both(op, "decode", _inputs(DECODE, None), kind="dense_attention", quick=True, tensor_parallel=2,
               also=RELATIONS, bugs=("F19", "F21", "F14"), input_class="blocks"),
        *_both(op, "ragged", _inputs(RAGGED, None), kind="dense_attention", quick=True, tensor_parallel=2,
               also=RELATIONS, bugs=("F21",), input_class="blocks"),
        *_both(op, "block_outer", _inputs(RAGGED, None, outer=3), kind="dense_attention", tensor_parallel=2,
               bugs=("F64",), input_class="blocks"),
        *q("all_heads", _inputs([(1, 300), (2, 130)], None), tensor_parallel=1, input_class="blocks", bugs=("F67",)),
        *q("tp8", _inputs(RAGGED, None), tensor_parallel=8, input_class="blocks", bugs=("F67",)),
        *q("prefix_hit", _inputs([(24, 384), (1, 384), (128, 384)], None), also=("chunked",), input_class="blocks",
           bugs=("F22",), quick=True),
        *q("prompt_384", _inputs([(384, 384)], None), checks=LIGHT, input_class="blocks", bugs=("F22",),
           tensor_parallel=4),
        *q("context_4k", _inputs([(1, 4096), (2, 3000)], None), checks=LIGHT, input_class="blocks"),
        *q("draft_block", _inputs(drafts, None), kind="drafter", input_class="blocks", quick=True, also=RELATIONS,
           bugs=("F27",)),
        *q("draft_long", _inputs([(8, 4096), (8, 900)], None), kind="drafter", input_class="blocks"),
        *q("causal_window_100", _inputs([(5, 300), (1, 101), (1, 100), (3, 3)], None), window_left=100,
           input_class="blocks", quick=True),
        *q("window_0", _inputs([(5, 300), (3, 3)], None), window_left=0, input_class="blocks"),
        *q("groups_apart", _edited(RAGGED, None, _groups_apart), tensor_parallel=1, input_class="flat", bugs=("F67",),
           quick=True),
        *q("flat", _edited([(2, 1000), (1, 300)], None, _flat), input_class="flat", quick=True),
        *q("needle", _edited([(2, 1000), (1, 300)], None, _needle), input_class="needle", quick=True),
        *q("ends", _edited([(1, 385), (2, 300)], None, _equal_in_reach), input_class="flat", quick=True, bugs=("F19",)),
        *q("large_logits", _edited(RAGGED, None, _large_logits), input_class="large", quick=True),
        *q("visible_nan", _edited([(2, 300), (3, 200)], None, _visible_nan), input_class="blocks", quick=True,
           bugs=("F28",)),
        *q("shared_pages", _shared_pages(None), input_class="blocks", bugs=("F21",)),
        *q("fused_row", _fused_row(None), input_class="blocks", bugs=("F65",), quick=True),
        *q("spread_table", _spread_table(None), input_class="blocks", bugs=("F64",)),
        *q("without_lse", _inputs(RAGGED, None), return_lse=False, input_class="blocks"),
        *q("other_scale", _inputs(RAGGED, None), scale=0.05, input_class="blocks", bugs=("F04",)),
        *q("page_64", _inputs([(2, 300), (1, 129)], None), page_size=64, input_class="blocks", bugs=("F25",)),
        *q("stray_tokens", lambda r, s: with_strays(_inputs(RAGGED, None)(r, s)), input_class="blocks", bugs=("F14",),
           quick=True),
        *q("beyond_31_bits", _huge(None), checks=("huge_pages_read",), dtypes=("bfloat16",), lazy=("kv",),
           input_class="blocks", bugs=("F63",)),
        *q("bound_too_small", _inputs([(1, 2048), (2, 700)], None), checks=("host_bound",), input_class="blocks",
           bugs=("F18",), quick=True),
        *q("bound_of_a_chunk", _inputs([(4, 130), (1, 300)], None), checks=("host_bound",), input_class="blocks",
           bugs=("F18",), quick=True),
        *q("padded_only", _inputs([(1, 0), (2, 0)], None, max_k=128), input_class="blocks", bugs=("F14", "F30"),
           quick=True),
        *q("no_token", _inputs([(0, 128)], None), bugs=("F30",), quick=True, input_class="blocks"),
    ]  # fmt: skip


CASES = [*_sparse(), *_paged()]
