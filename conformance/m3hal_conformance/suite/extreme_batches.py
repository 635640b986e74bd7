"""Attention and indexer where tests usually stop: thousands of tokens, 64K contexts, other lengths in one memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m3hal_conformance.case import Case, Inputs, Rng, Site
from m3hal_conformance.suite._build import LIGHT, ask, every_other, in_wide_row
from m3hal_conformance.suite._paged import Lengths, in_huge_cache
from m3hal_conformance.suite.attention import _every_block, _few, _shared_pages, _with_future
from m3hal_conformance.suite.attention import _inputs as attention
from m3hal_conformance.suite.extremes import LARGEST, OFTEN, Make, _edited
from m3hal_conformance.suite.indexer import _needles as needles

REQUESTS = ("row_alone", "permuted_requests")
#: 4,096 query tokens that see few keys each
CHUNKS: Lengths = [(128, 128 + 9 * n) for n in range(32)]
LONG: Lengths = [(1, 65_700), (2, 33_000)]


def _drawn_lengths(question: Callable[[Lengths], Any], queries: int = 1) -> Make:
    """Another seed has the same lengths in another order: tensors of the same shapes that say something else."""

    def make(rng: Rng, site: Site) -> Inputs:
        lengths = [1, 60, 128, 129, 250, 384, 300]
        found: Inputs = question([(queries, lengths[i] + queries - 1) for i in rng.permutation(len(lengths)).tolist()])(
            rng, site
        )
        return found

    return make


def _value_sizes(make: Make) -> Make:
    """The values of one page are a million times those of another, in every second head."""

    def far(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site)
        values = inputs["kv"].v
        size = torch.where(torch.arange(values.shape[1]) % 2 == 0, 1e6, 1e-8).view(-1, 1, 1)
        values.copy_((values.float() * size).to(values.dtype))
        return inputs

    return far


def _huge_cache(make: Make, name: str) -> Make:
    """The same pages at both ends of a cache that goes past 31 bits."""

    def huge(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site)
        cache, meta = in_huge_cache(inputs[name], inputs["meta"])
        return {**inputs, name: cache, "meta": meta}

    return huge


def _spread_ids(ids: Tensor) -> Tensor:
    """Every second place of wider rows."""
    return every_other(ids, 2)


def _attention() -> list[Case]:
    cases: list[Case] = []
    for op, kind, ids in (("sparse_attention", "sparse_attention", _few), ("paged_attention", "dense_attention", None)):
        asked: dict[str, Any] = {"kind": kind, "input_class": "blocks", "tensor_parallel": 8, "return_lse": True}
        long: dict[str, Any] = {
            "max_context": 1 << 17,
            "dtypes": ("bfloat16",),
            "checks": ("oracle", "written", "row_alone"),
        }
        two = {**asked, "tensor_parallel": 2}
        cases += [
            *ask(op, "tokens_4096", attention(CHUNKS, ids), checks=LARGEST, bugs=("F68",), **asked),
            *ask(op, "context_64k", attention(LONG, ids), bugs=("F15", "F63"), **{**asked, **long}),
            *ask(op, "lengths_differ", _drawn_lengths(partial(attention, ids=ids)), bugs=("F34",), quick=True,
                 also=("planned_once", "unbiased"), **two),
            *ask(op, "one_plan", attention([(1, 700), (1, 129), (1, 0)], ids), checks=("oracle", "planned_once"),
                 bugs=("F34",), quick=True, **two),
            *ask(op, "chunks_differ", _drawn_lengths(partial(attention, ids=ids), queries=3), bugs=("F34",),
                 **two),
            *ask(op, "wide_range", _value_sizes(attention([(2, 300), (1, 129)], ids)), quick=True, also=REQUESTS,
                 **two),
            *ask(op, "odd_address", _edited(attention([(2, 300), (1, 129)], ids), q=in_wide_row), quick=True,
                 bugs=("F65",), **two),
            *ask(op, "beyond_31_bits_one_head", _huge_cache(attention([(1, 700), (2, 300)], ids), "kv"), bugs=("F63",),
                 lazy=("kv",), checks=("huge_pages_read",), dtypes=("bfloat16",), **{**asked, "tensor_parallel": 4}),
            *ask(op, "called_often", attention([(1, 40), (1, 3)], ids), **OFTEN, **asked),
        ]  # fmt: skip
    strided = _edited(attention([(2, 700), (1, 300)], _few), block_ids=_spread_ids)
    future: Lengths = [(1, 2600), (1, 700), (1, 129)]
    block: dict[str, Any] = {"kind": "sparse_attention", "input_class": "blocks", "tensor_parallel": 2}
    cases += [
        *ask("sparse_attention", "every_other_id", strided, bugs=("F08",), return_lse=True, **block),
        *ask("sparse_attention", "future_ids_of_decode", attention(future, _with_future), bugs=("F13",),
             return_lse=True, **block),
        *ask("sparse_attention", "chunk_200", attention([(200, 1100)], _few), checks=LIGHT, bugs=("F68",),
             return_lse=True, **block),
        *ask("sparse_attention", "shared_prefix", _shared_pages(_every_block), bugs=("F21",), return_lse=True, **block),
    ]  # fmt: skip
    sixty_four = attention([(1, 60 + 9 * n) for n in range(64)], None)
    return [
        *cases,
        *ask("sparse_attention", "block_64", attention([(2, 1300), (1, 700)], _few), kind="sparse_attention",
             input_class="blocks", tensor_parallel=2, return_lse=True, block_size=64, bugs=("F25",), quick=True,
             also=REQUESTS),
        *ask("paged_attention", "batch_64", sixty_four, kind="dense_attention", input_class="blocks", checks=LIGHT,
             tensor_parallel=2, return_lse=True, bugs=("F68",), also=("permuted_requests",)),
    ]  # fmt: skip


def _indexer() -> list[Case]:
    cases: list[Case] = []
    for op in ("block_scores", "select_blocks"):
        asked: dict[str, Any] = {"kind": "sparse_attention", "input_class": "needles"}
        long: dict[str, Any] = {
            "max_context": 1 << 17,
            "dtypes": ("bfloat16",),
            "checks": ("oracle", "written", "row_alone"),
        }
        cases += [
            *ask(op, "tokens_4096", needles(CHUNKS), checks=LIGHT, bugs=("F68",), **asked),
            *ask(op, "context_64k", needles(LONG), bugs=("F15", "F63"), **{**asked, **long}),
            *ask(op, "lengths_differ", _drawn_lengths(needles), bugs=("F34",), also=("planned_once",), quick=True,
                 **asked),
            *ask(op, "block_64", needles([(2, 2500), (1, 129)]), block_size=64, bugs=("F25",), quick=True,
                 also=REQUESTS, **asked),
            *ask(op, "odd_address", _edited(needles([(2, 300), (1, 129)]), index_q=in_wide_row), bugs=("F65",),
                 quick=True, **asked),
            *ask(op, "called_often", needles([(1, 40), (1, 3)]), **OFTEN, **asked),
        ]  # fmt: skip
    mixed: Lengths = [(1, 40 if n % 2 else 2100 + 17 * n) for n in range(64)]
    return [
        *cases,
        *ask("block_scores", "beyond_31_bits_page_64", _huge_cache(needles([(1, 700), (2, 300)]), "index_cache"),
             kind="sparse_attention", page_size=64, checks=("huge_pages_read",), dtypes=("bfloat16",),
             lazy=("index_cache",), input_class="needles", bugs=("F63",)),
        *ask("select_blocks", "batch_64_long", needles(mixed), kind="sparse_attention",
             checks=LIGHT, also=("permuted_requests",), input_class="needles", bugs=("F68",)),
        *ask("block_scores", "bound_too_small_for_one", needles([(1, 2048), (2, 900), (1, 100)]), bugs=("F18",),
             kind="sparse_attention", checks=("host_bound",), input_class="needles"),
    ]  # fmt: skip


CASES = [*_attention(), *_indexer()]
