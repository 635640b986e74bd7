"""``draft_block_sample``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal.ops.draft_block_sample import MarkovHead
from m3hal_conformance.case import Case, Inputs, Make, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask, column_major, every_other, in_wide_row

NAN, INF = float("nan"), float("inf")
#: M3.1's drafter proposes 7 tokens on NVIDIA's and 3 on AMD's cards; the rank is that of the published DSpark
BLOCK, RANK, HIDDEN = 7, 256, 64
TARGET, PRUNED = 640, 250


def _block(
    requests: int, length: int = BLOCK, *, rank: int = RANK, vocabulary: int = TARGET, noise: float = 0.0
) -> Make:
    """Base logits and a bias of the same size: neither decides alone. noise: of Gumbel noise, the temperature."""

    def make(rng: Rng, site: Site) -> Inputs:
        shape = (requests, length, vocabulary)
        uniform = rng.uniform(0, 1, *shape).clamp(1e-7, 1 - 1e-7)
        return {
            "base_logits": (3 * rng.normal(*shape)).to(dtype_of(site)),
            "hidden": None,
            "head": _head(rng, site, vocabulary, rank),
            "previous": rng.integers(0, vocabulary, requests).int(),
            "noise": -noise * torch.log(-torch.log(uniform)) if noise else None,
        }

    return make


def _head(rng: Rng, site: Site, vocabulary: int, rank: int) -> MarkovHead:
    w1, w2 = rng.normal(vocabulary, rank), rng.normal(vocabulary, rank) * (3 * rank**-0.5)
    return MarkovHead(w1.to(dtype_of(site)), w2.to(dtype_of(site)))


def _with(make: Make, change: Callable[[Rng, Site, Inputs], Mapping[str, Any]]) -> Make:
    def changed(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site)
        return {**inputs, **change(rng, site, inputs)}

    return changed


def _confidence(with_markov: bool) -> Callable[[Rng, Site, Inputs], Mapping[str, Any]]:
    """A head on the hidden states, and on the embedding of the token before, which says as much."""

    def change(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
        requests, length, _ = inputs["base_logits"].shape
        width = HIDDEN + (inputs["head"].w1.shape[1] if with_markov else 0)
        weight = rng.normal(width) * width**-0.5
        hidden = rng.normal(requests, length, HIDDEN).to(dtype_of(site))
        return {"hidden": hidden, "head": replace(inputs["head"], confidence=weight)}

    return change


def _pruned(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
    """250 of 640 tokens can be drafted, in the order of the target's ids; the others' embeddings are NaN."""
    kept = rng.permutation(TARGET)[:PRUNED].sort().values
    w1 = torch.full((TARGET, RANK), NAN).to(dtype_of(site))
    w1[kept] = inputs["head"].w1
    head = replace(inputs["head"], w1=w1, d2t=kept - torch.arange(PRUNED))
    return {"head": head, "previous": kept[inputs["previous"].long()].int()}


def _unordered(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
    """Draft ids in the order of how often they occur, so that half of the offsets are negative, and all of it in views.

    Only two requests are real: a padded one has any negative token.
    """
    kept = rng.permutation(TARGET)[:PRUNED]
    w1 = torch.full((TARGET, RANK), NAN).to(dtype_of(site))
    w1[kept] = inputs["head"].w1
    given = replace(inputs["head"], w1=w1, d2t=_strided(kept - torch.arange(PRUNED)))
    confident = _confidence(True)(rng, site, {**inputs, "head": given})
    head = confident["head"]
    previous = torch.tensor([int(kept[3]), -9, int(kept[-1])], dtype=torch.int32)
    head = replace(head, confidence=every_other(head.confidence, 0))
    return {"head": head, "previous": previous, "hidden": in_wide_row(confident["hidden"])}


def _late(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
    """The last ids of the vocabulary are drawn, those past 16 bits."""
    inputs["base_logits"][..., 2**16 :] += 24
    return {}


def _padded(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
    """Padded requests between others; what their base logits hold is nobody's."""
    previous, base = inputs["previous"].clone(), inputs["base_logits"].clone()
    previous[1::2], base[1::2] = -1, NAN
    return {"previous": previous, "base_logits": base}


def _chained(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
    """Each token alone decides the next one: the base logits say nothing, the bias is one-hot."""
    order = rng.permutation(RANK)
    w1, w2 = torch.zeros(RANK, RANK), torch.eye(RANK)
    w1[torch.arange(RANK), order] = 4.0
    head = MarkovHead(w1.to(dtype_of(site)), w2.to(dtype_of(site)))
    return {"head": head, "base_logits": torch.zeros_like(inputs["base_logits"])}


def _tied(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
    """Small whole numbers and no bias: many tokens share the largest sum."""
    base = rng.integers(0, 4, *inputs["base_logits"].shape).to(dtype_of(site))
    return {"base_logits": base, "head": replace(inputs["head"], w2=torch.zeros_like(inputs["head"].w2))}


def _broken(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
    """Masked tokens at -inf, NaN among the logits, a row of nothing else, an infinite one."""
    base = inputs["base_logits"].clone()
    base[0, :, ::2] = -INF
    base[1, :, 5::9] = NAN
    base[2, 3] = NAN
    base[3, 2] = -INF
    base[4, 1, 77] = INF
    return {"base_logits": base}


def _views(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
    head = MarkovHead(in_wide_row(inputs["head"].w1), column_major(inputs["head"].w2))
    return {"base_logits": in_wide_row(inputs["base_logits"]), "head": head}


def _other_views(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
    base, noise, previous = inputs["base_logits"], inputs["noise"], inputs["previous"]
    return {"base_logits": every_other(base, 0), "noise": every_other(noise, 1), "previous": _strided(previous)}


def _strided(ids: Tensor) -> Tensor:
    wide = torch.full((2 * len(ids),), 7, dtype=ids.dtype)
    wide[::2] = ids
    return wide[::2]


def _long_ids(rng: Rng, site: Site, inputs: Inputs) -> Mapping[str, Any]:
    return {"previous": inputs["previous"].long()}


def _drafts() -> list[Case]:
    def q(name: str, make: Make, **options: Any) -> list[Case]:
        return ask("draft_block_sample", name, make, kind="drafter", **options)

    pruned = _with(_block(5, vocabulary=PRUNED), _pruned)
    return [
        *q("greedy", _block(5), quick=True),
        *q("sampled", _block(5, noise=1.0), quick=True),
        *q("hot", _block(4, noise=30.0), quick=True),
        *q("pruned", pruned, quick=True),
        *q("pruned_sampled", _with(_block(3, vocabulary=PRUNED, noise=0.7), _pruned)),
        *q("confident", _with(_block(5), _confidence(True)), quick=True),
        *q("confident_alone", _with(_block(5), _confidence(False))),
        *q("confident_pruned", _with(pruned, _confidence(True)), quick=True),
        *q("padded", _with(_with(_block(5), _confidence(True)), _padded), bugs=("F29",), quick=True),
        *q("padded_sampled", _with(_block(4, 3, noise=1.0), _padded), bugs=("F29",)),
        *q("chained", _with(_block(6, 8, vocabulary=RANK), _chained), quick=True, input_class="exact"),
        *q("ties", _with(_block(5), _tied), bugs=("F16",), quick=True),
        *q("broken_logits", _with(_block(5), _broken), bugs=("F28",), quick=True),
        *q("broken_sampled", _with(_block(5, 5, noise=1.0), _broken), bugs=("F28",)),
        *q("rank_16", _block(3, 3, rank=16), quick=True),
        *q("vocabulary_5003", _block(2, 3, vocabulary=5003), checks=LIGHT, bugs=("F68",)),
        *[case for name, noise in (("", 0.0), ("_sampled", 1.0)) for case in (
            *q(f"vocabulary_70001{name}", _with(_block(1, 2, rank=16, vocabulary=70001, noise=noise), _late),
               checks=LIGHT),
            *q(f"unordered{name}", _with(_block(3, 4, vocabulary=PRUNED, noise=noise), _unordered),
               bugs=("F29", "F65"), quick=True))],
        *q("block_16", _block(2, 16), checks=LIGHT),
        *q("strided", _with(_block(3), _views), bugs=("F65",), quick=True),
        *q("every_other", _with(_block(3, noise=1.0), _other_views), bugs=("F65",)),
        *q("long_ids", _with(_block(3), _long_ids)),
        *q("one_request", _block(1), bugs=("F32",), quick=True),
        *q("one_token", _block(4, 1), quick=True),
        *q("no_request", _block(0), bugs=("F30",), quick=True),
        *q("requests_65", _block(65, 2), checks=LIGHT, bugs=("F68",)),
    ]  # fmt: skip


CASES = _drafts()
