"""``topk_blocks`` and ``merge_topk``: exact given the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from m3hal.ops.topk_blocks import topk_blocks
from m3hal_conformance.case import Case, Inputs, Make, Rng, Site
from m3hal_conformance.suite._build import ask, every_other

INF, NAN = float("inf"), float("nan")
ONE = ("float32",)  # scores are fp32 at every site
RELATIONS = ("row_alone", "permuted_rows")
#: blocks a token sees: none, one, around k and past it
VISIBLE = [0, 1, 2, 15, 16, 17, 33, 40]


def _scores(fill: Callable[[Rng, int, int, int], Tensor], visible: list[int], width: int, heads: int = 4) -> Make:
    """Scores of tokens that see ``visible`` blocks; what lies past them is hidden and holds the rng's ``stale``."""

    def make(rng: Rng, site: Site) -> Inputs:
        scores = fill(rng, len(visible), heads, width).float()
        hidden = torch.arange(width) >= torch.tensor(visible, dtype=torch.int64)[:, None, None]
        scores = torch.where(hidden, -INF if rng.stale != rng.stale else rng.stale, scores)
        return {"scores": scores, "visible_blocks": torch.tensor(visible, dtype=torch.int32)}

    return make


def _normal(rng: Rng, *shape: int) -> Tensor:
    return rng.normal(*shape)


def _one_ulp_apart(rng: Rng, tokens: int, heads: int, width: int) -> Tensor:
    """Scores that differ in their last bit only: a ranking on fewer bits shuffles them."""
    order = torch.stack([rng.permutation(width) for _ in range(tokens * heads)]).view(tokens, heads, width)
    return (torch.full((), 1.0).view(torch.int32) + order.int()).view(torch.float32)


def _few_values(rng: Rng, *shape: int) -> Tensor:
    return rng.integers(0, 3, *shape).float()


def _signed_zeros(rng: Rng, *shape: int) -> Tensor:
    return torch.where(rng.normal(*shape) > 0, 0.0, -0.0)


def _worst_local(rng: Rng, tokens: int, heads: int, width: int) -> Tensor:
    """Scores fall with the block id, so that the newest block is always the worst."""
    return -torch.arange(width).expand(tokens, heads, width) - 1e6


def _extreme(rng: Rng, tokens: int, heads: int, width: int) -> Tensor:
    """Infinities, 1e30 (a peer's magic score), the largest number and NaN among ordinary scores."""
    scores = rng.normal(tokens, heads, width)
    odd = torch.tensor([INF, 1e30, 3.4e38, NAN, -INF, -1e30, 1e29, NAN])
    places = torch.stack([rng.permutation(width)[: len(odd)] for _ in range(tokens * heads)]).view(tokens, heads, -1)
    return scores.scatter(-1, places, odd.expand(tokens, heads, -1))


def _mostly_nan(rng: Rng, *shape: int) -> Tensor:
    return torch.where(rng.uniform(0, 1, *shape) < 0.7, NAN, rng.normal(*shape))


def _topk() -> list[Case]:
    def q(name: str, make: Any, **options: Any) -> list[Case]:
        options = {"max_context": 1 << 20, **options}  # 8,192 blocks
        return ask("topk_blocks", name, make, kind="sparse_attention", dtypes=ONE, **options)

    def strided(rng: Rng, site: Site) -> Inputs:
        inputs = _scores(_normal, VISIBLE, 40)(rng, site)
        return {**inputs, "scores": inputs["scores"].transpose(0, 1).contiguous().transpose(0, 1)}

    def spaced(rng: Rng, site: Site) -> Inputs:
        inputs = _scores(_normal, VISIBLE, 40)(rng, site)
        return {**inputs, "scores": every_other(inputs["scores"], 2)}

    wide = [129, 4096, 4097, 8192, 17]
    return [
        *q("around_k", _scores(_normal, VISIBLE, 40), also=("stale", *RELATIONS), bugs=("F12", "F20"), quick=True),
        *q("all_equal", _scores(lambda r, *s: torch.ones(s), VISIBLE, 40), bugs=("F16",), also=("stale",), quick=True),
        *q("few_values", _scores(_few_values, VISIBLE, 64), bugs=("F16",), quick=True),
        *q("one_ulp_apart", _scores(_one_ulp_apart, [40, 33, 20], 40), quick=True),
        *q("one_ulp_apart_wide", _scores(_one_ulp_apart, [129, 100], 129), quick=True),
        *q("signed_zeros", _scores(_signed_zeros, VISIBLE, 40), bugs=("F16", "F56")),
        *q("signed_zeros_wide", _scores(_signed_zeros, [129, 100], 129), bugs=("F16", "F56"), quick=True),
        *q("all_negative", _scores(lambda r, *s: -1 - r.uniform(0, 1, *s), VISIBLE, 64), bugs=("F17",),
           also=("stale",), quick=True),
        *q("newest_is_worst", _scores(_worst_local, VISIBLE, 40), quick=True),
        *q("extreme", _scores(_extreme, [40, 33, 20, 17], 40), quick=True, bugs=("F28",)),
        *q("mostly_nan", _scores(_mostly_nan, VISIBLE, 40), bugs=("F28",), quick=True),
        *q("all_nan_or_absent", _scores(lambda r, *s: torch.full(s, NAN), VISIBLE, 40), bugs=("F28", "F14")),
        *q("all_minus_inf", _scores(lambda r, *s: torch.full(s, -INF), VISIBLE, 40), quick=True),
        *q("tokens_equal_heads", _scores(_normal, [3, 17, 40, 20], 40), quick=True),
        *q("tokens_130", _scores(_normal, [n % 41 for n in range(130)], 40), quick=True, bugs=("F68",)),
        *q("fewer_than_k_columns", _scores(_normal, [0, 1, 5, 9], 9), bugs=("F12",), quick=True),
        *q("one_column", _scores(_normal, [0, 1], 1), bugs=("F12",)),
        *q("wide", _scores(_normal, wide, 8192, heads=1), bugs=("F15",), quick=True),
        *q("wide_all_equal", _scores(lambda r, *s: torch.zeros(s), wide, 8192, heads=1), quick=True,
           bugs=("F15", "F16")),
        *q("beyond_16_bits", _scores(lambda r, *s: torch.arange(s[-1]).expand(s) * 1.0, [65600, 65536], 65600,
           heads=1), max_context=1 << 24, bugs=("F15",)),
        *q("beyond_16_bits_random", _scores(_normal, [70000], 70000, heads=1), max_context=1 << 24, bugs=("F15",),
           quick=True),
        *q("init_1_local_2", _scores(_worst_local, VISIBLE, 40), init_blocks=1, local_blocks=2),
        *q("init_2_best_elsewhere", _scores(_normal, VISIBLE, 40), init_blocks=2, local_blocks=1),
        *q("top_8", _scores(_normal, VISIBLE, 40), top_k_blocks=8),
        *q("head_major", strided, bugs=("F08",), quick=True),
        *q("every_other_score", spaced, bugs=("F65",), quick=True),
        *q("no_token", _scores(_normal, [], 40), bugs=("F30",), quick=True),
        *q("one_token", _scores(_normal, [40], 40), bugs=("F32",)),
    ]  # fmt: skip


def _sharded(
    ranks: int, fill: Callable[[Rng, int, int, int], Tensor], visible: list[int], shuffle: bool = False
) -> Make:
    """Rank r owns blocks r, r + R, ...; each offers its best k. Absent offers hold scores that must not count."""

    def make(rng: Rng, site: Site) -> Inputs:
        width, heads, k = max([1, *visible]), site.num_index_heads, site.top_k_blocks
        scores = fill(rng, len(visible), heads, width).float()
        offered = torch.full((ranks, len(visible), heads, k), -1, dtype=torch.int32)
        values = torch.full(offered.shape, 3e38 if rng.stale != rng.stale else rng.stale)
        for rank in range(ranks):
            mine = torch.arange(width)[rank::ranks]
            own = torch.tensor([int((mine < n).sum()) for n in visible], dtype=torch.int32)
            local = topk_blocks(scores[..., mine], own, top_k_blocks=k, init_blocks=0, local_blocks=0)
            real = local >= 0
            ids = torch.where(real, mine[local.clamp(min=0).long()].int() if len(mine) else local, -1)
            offered[rank] = ids
            values[rank] = torch.where(real, scores.gather(-1, ids.clamp(min=0).long()), values[rank])
        if shuffle:
            order = rng.permutation(k)
            offered, values = offered[..., order], values[..., order]
        return {"scores": values, "ids": offered, "visible_blocks": torch.tensor(visible, dtype=torch.int32)}

    return make


def _whole(ranks: int, fill: Any, visible: list[int], name: str) -> Callable[[Inputs], dict[str, Tensor]]:
    """The selection that one device would make from all scores, made anew from the same random numbers."""

    def golden(inputs: Inputs) -> dict[str, Tensor]:
        rng = Rng(name)
        scores = fill(rng, len(visible), 4, max([1, *visible])).float()
        whole = topk_blocks(scores, inputs["visible_blocks"], top_k_blocks=16, init_blocks=0, local_blocks=1)
        return {"out": whole}

    return golden


def _merge() -> list[Case]:
    def q(name: str, make: Any, **options: Any) -> list[Case]:
        return ask("merge_topk", name, make, kind="sparse_attention", dtypes=ONE, max_context=1 << 20, **options)

    cases = []
    for ranks in (2, 4, 8):
        for label, fill in (("normal", _normal), ("few_values", _few_values), ("equal", lambda r, *s: torch.ones(s))):
            name = f"ranks_{ranks}_{label}"
            cases += q(
                name,
                _sharded(ranks, fill, [*VISIBLE, 3, 4, 5]),
                bugs=("F35", "F16"),
                quick=ranks == 4,
                golden=_whole(ranks, fill, [*VISIBLE, 3, 4, 5], f"merge_topk/{name}/float32"),
                also=("stale", "permuted_rows"),
            )
    return [
        *cases,
        *q("unordered_offers", _sharded(4, _few_values, VISIBLE, shuffle=True), quick=True, also=("row_alone",)),
        *q("newest_is_worst", _sharded(4, _worst_local, [*VISIBLE, 70, 129, 200]), quick=True),
        *q("extreme", _sharded(2, _extreme, [40, 33, 20, 17]), bugs=("F28",), quick=True),
        *q("mostly_nan", _sharded(4, _mostly_nan, VISIBLE), bugs=("F28",)),
        *q("all_negative", _sharded(4, lambda r, *s: -1 - r.uniform(0, 1, *s), VISIBLE), bugs=("F17",), quick=True),
        *q("tokens_130", _sharded(4, _normal, [n % 41 for n in range(130)]), quick=True, bugs=("F68",)),
        *q("one_rank", _sharded(1, _normal, VISIBLE), bugs=("F35",)),
        *q("more_ranks_than_blocks", _sharded(8, _normal, [1, 2, 3, 0]), bugs=("F35",), quick=True),
        *q("init_1_local_2", _sharded(4, _normal, VISIBLE), init_blocks=1, local_blocks=2),
        *q("wide", _sharded(8, _normal, [2048, 2049, 4097])),
        *q("no_token", _sharded(4, _normal, []), bugs=("F30",), quick=True),
        *q("tokens_equal_heads", _sharded(4, _normal, [3, 17, 40, 20])),
    ]


CASES = [*_topk(), *_merge()]
