"""``select_blocks`` with a group: ranks that each score a part of the blocks choose what one of them would alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from m3hal.shape import Site
from m3hal_conformance.case import Case, Inputs, Rng
from m3hal_conformance.ranks import PerRank
from m3hal_conformance.suite._build import LIGHT, ask, in_wide_row
from m3hal_conformance.suite._paged import Lengths
from m3hal_conformance.suite.indexer import (
    _all_negative,
    _equal_keys,
    _heads_differ,
    _needles,
    _ramp,
    _visible_nan,
    _with,
)
from m3hal_conformance.suite.stored_caches import INDEX, _in_maps

OP = "select_blocks"
#: 0, 1, 4, 15, 16, 17 and more visible blocks; ragged queries, one request without any
AROUND: Lengths = [(1, 0), (1, 1), (2, 385), (1, 1920), (1, 2048), (1, 2049), (0, 300), (3, 3000), (2, 4096)]
ALONE = (*LIGHT, "one_rank")
_Options = dict[str, Any]


def _among(ranks: int, make: Any) -> Callable[..., Inputs]:
    """The same question to several ranks, all of which hold everything."""

    def grouped(rng: Rng, site: Site, kind: str = "hnd") -> Inputs:
        inputs = make(rng, site) if kind == "hnd" else make(rng, site, kind)
        return {**inputs, "group": PerRank([None] * ranks)}

    return grouped


def _clustered(rng: Rng, q: Tensor, keys: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Three scores in all, exactly representable: ties within ranks and between them decide every row."""
    unit = torch.zeros_like(q)
    unit[..., 0] = 1
    for k in keys:
        k.zero_()
        k[:, 0, 0] = rng.integers(0, 3, -(-len(k) // 128)).repeat_interleave(128)[: len(k)].float()
    return unit, keys


def _strided(rng: Rng, site: Site) -> Inputs:
    """Queries as slices of wider rows, as a fused projection leaves them."""
    inputs = _needles([(2, 2500), (3, 129)])(rng, site)
    return {**inputs, "index_q": in_wide_row(inputs["index_q"], 64, 64)}


def _question(ranks: int, name: str, make: Any, also: tuple[str, ...] = (), **options: Any) -> list[Case]:
    asked: dict[str, Any] = {"kind": "sparse_attention", "input_class": "needles", **options}
    case = _among(ranks, make)
    return ask(OP, f"ranks_{ranks}_{name}", case, checks=(*ALONE, *also), context_parallel=ranks, **asked)


def _plain() -> list[Case]:
    q, ramp, narrow = _question, _Options(input_class="ramp"), _Options(dtypes=("bfloat16",))
    short: Lengths = [(1, 256), (1, 100), (3, 3)]
    forced = _Options(init_blocks=1, local_blocks=2)
    around = _Options(bugs=("F20", "F21"), quick=True)
    return [
        *q(4, "around_k", _needles(AROUND), also=("stale",), **around),
        *[case for ranks in (2, 3, 8) for case in q(ranks, "around_k", _needles(AROUND), **around, **narrow)],
        *q(4, "permuted", _needles(AROUND[-2:]), also=("permuted_pages", "rerun", "overwritten"), **narrow),
        *q(8, "empty_shards", _needles(short), quick=True),
        *q(4, "all_equal", _with([(1, 4096), (2, 2500)], _equal_keys), bugs=("F16",), quick=True, **ramp),
        *q(4, "clustered", _with([(1, 4096), (2, 3333)], _clustered), bugs=("F16",), quick=True, **ramp),
        *q(3, "clustered", _with([(1, 4000), (2, 3333)], _clustered), bugs=("F16",), **ramp, **narrow),
        *q(4, "ramp", _with([(2, 2181), (1, 4000)], _ramp), also=("stale",), quick=True, **ramp),
        *q(4, "heads_differ", _with([(4, 4096)], _heads_differ), **ramp, **narrow),
        *q(2, "all_negative", _with([(1, 2560), (1, 2600)], _all_negative), bugs=("F17",), input_class="positive"),
        *q(4, "visible_nan", _with([(2, 3000), (1, 2500)], _visible_nan), bugs=("F28",), quick=True),
        *q(4, "nothing_forced", _needles([(3, 4000), (1, 2181)]), local_blocks=0, quick=True),
        *q(4, "init_1_local_2", _needles([(2, 3000), (1, 200), (1, 2049)]), quick=True, **forced),
        *q(3, "init_1_local_2", _with([(2, 3000), (1, 2500)], _clustered), **forced, **ramp, **narrow),
        *q(4, "page_64", _needles([(2, 2500), (1, 129)]), page_size=64, bugs=("F25",)),
        *q(4, "tp4", _needles([(2, 2500)]), tensor_parallel=4, bugs=("F67",)),
        *q(4, "blocks_129", _needles([(1, 129 * 128), (2, 8200)]), max_context=1 << 15, bugs=("F15",), **narrow),
        *q(4, "blocks_260", _with([(1, 260 * 128)], _ramp), max_context=1 << 16, bugs=("F15",), **ramp, **narrow),
        *q(4, "strided", _strided, bugs=("F65",), **narrow),
        *q(2, "padded_only", _needles([(1, 0), (1, 0)], max_k=256), bugs=("F14",)),
        *q(4, "no_token", _needles([(0, 128)]), bugs=("F30",), quick=True),
    ]  # fmt: skip


def _stored() -> list[Case]:
    """Index keys in every format and page map; how they are read does not depend on the queries' format."""
    make = _among(4, _needles([(1, 2500), (2, 3000), (1, 129), (1, 0)]))
    asked: dict[str, Any] = {"checks": ALONE, "input_class": "needles", "context_parallel": 4, "dtypes": ("bfloat16",)}
    return _in_maps(OP, "ranks_4", make, INDEX, quick=True, **asked)


CASES = [*_plain(), *_stored()]
