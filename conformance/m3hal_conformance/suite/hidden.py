"""What an attention row does not see must not matter to it, as far as the definitions say so.

Blocks that a row's ids do not name may hold NaN. A key of the request itself that lies in a row's future, or outside
its window, may hold any finite number; NaN may spread there to rows that share a tile, so nobody is asked about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from m3hal_conformance.case import Case, Inputs, MakeIn, Rng, Site, dtype_of
from m3hal_conformance.suite._build import ask
from m3hal_conformance.suite._paged import Lengths, block_inputs, choose, filled, index_layout, kv_layout, requests

BOTH = ("hnd", "nhd")
NAN = float("nan")


def _finite(rng: Rng) -> float:
    """What a key may hold that only other rows of its request could see."""
    return 1e4 if rng.stale != rng.stale else rng.stale


def _unselected(rng: Rng, site: Site, kind: str) -> Inputs:
    """Blocks that no row of a request selects in a head hold the rng's stale bytes there, tokens though they are."""
    held = requests(rng, [(1, 1300), (3, 700), (1, 300)], site.page_size)
    found, ids = block_inputs(rng, site, held), choose(rng, held, site, count=4)
    for request, (_, length) in enumerate(held.lengths):
        block = torch.arange(length) // site.block_size
        for head in range(site.num_kv_heads):
            unseen = ~torch.isin(block, ids[held.rows(request), head].long())
            found.keys[request][unseen, head] = rng.stale
            found.values[request][unseen, head] = rng.stale
    kv = filled(held, kv_layout(site, kind), found.keys, found.values, rng)
    return {"q": found.q, "kv": kv, "block_ids": ids, "meta": held.meta}


def _one_rows_block(rng: Rng, site: Site, kind: str) -> Inputs:
    """Block 1 holds a NaN value and only the first of three rows selects it: the others are numbers."""
    held = requests(rng, [(3, 600), (2, 500)], site.page_size)
    found, ids = block_inputs(rng, site, held), torch.full((5, site.num_kv_heads, site.top_k_blocks), -1)
    ids[:, :, :2] = torch.tensor([[0, 1], [2, 4], [0, 4], [0, 3], [1, 3]])[:, None]
    found.values[0][130] = NAN
    kv = filled(held, kv_layout(site, kind), found.keys, found.values, rng)
    return {"q": found.q, "kv": kv, "block_ids": ids.int(), "meta": held.meta}


def _one_rows_block_of_many(rng: Rng, site: Site, kind: str) -> Inputs:
    """The same in as many requests as there may be: few programs or none share a request's blocks."""
    count = site.max_seqs
    held = requests(rng, [(3, 500)] * count, site.page_size)
    found, ids = block_inputs(rng, site, held), torch.full((3 * count, site.num_kv_heads, site.top_k_blocks), -1)
    ids[:, :, :2] = torch.tensor([[1, 3], [2, 3], [0, 3]]).repeat(count, 1)[:, None]
    for values in found.values:
        values[130] = NAN
    kv = filled(held, kv_layout(site, kind), found.keys, found.values, rng)
    return {"q": found.q, "kv": kv, "block_ids": ids.int(), "meta": held.meta}


def _unseen_future(rng: Rng, site: Site, kind: str) -> Inputs:
    """The first row of a chunk selects the newest block and the later ones do not: its last keys are seen by nobody."""
    held = requests(rng, [(3, 300), (4, 641), (2, 130)], site.page_size)
    found, ids = block_inputs(rng, site, held), choose(rng, held, site, count=3)
    for request, (queries, length) in enumerate(held.lengths):
        rows = held.rows(request)
        ids[rows.start + 1 : rows.stop] = -1
        ids[rows.start + 1 : rows.stop, :, 0] = 0
        first = length - queries
        found.keys[request][first + 1 :], found.values[request][first + 1 :] = _finite(rng), _finite(rng)
    kv = filled(held, kv_layout(site, kind), found.keys, found.values, rng)
    return {"q": found.q, "kv": kv, "block_ids": ids, "meta": held.meta}


def _outside_window(rng: Rng, site: Site, kind: str) -> Inputs:
    """Keys before every row's window are large."""
    held = requests(rng, [(5, 700), (1, 300), (2, 129)], site.page_size)
    found = block_inputs(rng, site, held)
    for request, (queries, length) in enumerate(held.lengths):
        hidden = slice(0, max(0, length - queries - site.window_left))
        found.keys[request][hidden], found.values[request][hidden] = _finite(rng), _finite(rng)
    kv = filled(held, kv_layout(site, kind), found.keys, found.values, rng)
    return {"q": found.q, "kv": kv, "meta": held.meta}


def _large_future(sparse: bool) -> MakeIn:
    """Each later token of a chunk is a hundred times larger: a row that sees one of them is nothing else any more."""

    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        lengths: Lengths = [(3, 300), (5, 130), (4, 4), (17, 17)]
        held = requests(rng, lengths, site.page_size)
        found = block_inputs(rng, site, held)
        for request, (queries, length) in enumerate(lengths):
            size = torch.ones(length)
            size[length - queries :] = 100.0 ** torch.arange(queries).clamp(max=4)
            found.values[request].mul_(size[:, None, None])
        kv = filled(held, kv_layout(site, kind), found.keys, found.values, rng)
        chosen = {"block_ids": choose(rng, held, site)} if sparse else {}
        return {"q": found.q, "kv": kv, **chosen, "meta": held.meta}

    return make


def _future_nan(rng: Rng, site: Site, kind: str) -> Inputs:
    """The last index key of each request is NaN: a maximum hides it from the rows before, whatever shares a tile."""
    held = requests(rng, [(3, 131), (2, 128), (4, 260)], site.page_size)
    keys: list[Tensor] = [rng.normal(length, 1, site.index_dim) for _, length in held.lengths]
    for key in keys:
        key[-1] = NAN
    index_q = rng.normal(held.tokens, site.num_index_heads, site.index_dim).to(dtype_of(site))
    cache = filled(held, index_layout(site, kind), keys, None, rng)
    return {"index_q": index_q, "index_cache": cache, "meta": held.meta}


def _in_layouts(op: str, name: str, make: Any, layouts: tuple[str, ...] = ("hnd",), **options: Any) -> list[Case]:
    cases: list[Case] = []
    for layout in layouts:
        bound = lambda rng, site, layout=layout: make(rng, site, layout)  # noqa: E731
        cases += ask(op, name, bound, layouts=(layout,), tensor_parallel=2, **options)
    return cases


def _stored(ask_it: Callable[..., list[Case]], name: str, make: Any, **options: Any) -> list[Case]:
    """The same question of caches that kernels read on another path."""
    found: list[Case] = []
    for format, layout in (("fp8_e4m3", "hnd"), ("nvfp4", "msa_slot")):
        asked = {"kv_format": format, "index_format": format, "dtypes": ("bfloat16",), "quick": False, **options}
        found += ask_it(f"{format}_{name}", make, layouts=(layout,), **asked)
    return found


def _hidden() -> list[Case]:
    def sparse(name: str, make: Any, **options: Any) -> list[Case]:
        asked = {"kind": "sparse_attention", "return_lse": True, "quick": True, "input_class": "blocks"}
        return _in_layouts("sparse_attention", name, make, **{**asked, **options})

    def paged(name: str, make: Any, **options: Any) -> list[Case]:
        asked = {"kind": "dense_attention", "return_lse": True, "quick": True, "input_class": "blocks"}
        return _in_layouts("paged_attention", name, make, **{**asked, **options})

    return [
        *sparse("unselected", _unselected, layouts=BOTH, also=("stale",), bugs=("F21",)),
        *sparse("one_rows_block", _one_rows_block, bugs=("F21", "F28")),
        *sparse("one_rows_block_of_many", _one_rows_block_of_many, bugs=("F21", "F28"), quick=False),
        *sparse("unseen_future", _unseen_future, also=("stale",), bugs=("F22",)),
        *sparse("large_future", _large_future(True), input_class="growing", bugs=("F22",)),
        *paged("outside_window", _outside_window, window_left=100, also=("stale", "row_alone"), bugs=("F22",)),
        *paged("large_future", _large_future(False), input_class="growing", bugs=("F22",)),
        *_stored(sparse, "unselected", _unselected, also=("stale",), bugs=("F21",)),
        *_stored(sparse, "unseen_future", _unseen_future, also=("stale",), bugs=("F22",)),
        *_stored(paged, "outside_window", _outside_window, window_left=100, also=("stale",), bugs=("F22",)),
        *_in_layouts("block_scores", "future_nan", _future_nan, kind="sparse_attention", quick=True,
                     also=("row_alone",), input_class="needles", bugs=("F20", "F28")),
    ]  # fmt: skip


CASES = _hidden()
