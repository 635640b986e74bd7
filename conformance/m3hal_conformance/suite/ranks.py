"""``allreduce_add_rms_norm`` and ``mega_moe``: several ranks at once, and one alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal.formats import QTensor
from m3hal.ops import ExpertWeights
from m3hal_conformance.case import Case, Inputs, Make, Rng, Site, dtype_of
from m3hal_conformance.ranks import PerRank
from m3hal_conformance.suite._build import LIGHT, ask, every_other, in_wide_row, spikes
from m3hal_conformance.suite.norms import _pair
from m3hal_conformance.suite.quantised import _stored

NAN, INF = float("nan"), float("inf")
H, WIDTH = 6144, 512
#: of the experts, all ranks together
EXPERTS, HIDDEN, INNER, K = 8, 64, 32, 4


def _joined(shares: Sequence[Tensor], rng: Rng, site: Site) -> Inputs:
    """Each rank's share, with a residual and a weight that all have."""
    tokens, width = shares[0].shape
    own = [share.to(dtype_of(site)) for share in shares]
    residual, weight = (4 * rng.normal(tokens, width), 0.3 * rng.normal(width))
    common = {"residual": residual.to(dtype_of(site)), "weight": weight.to(dtype_of(site)), "group": None}
    return {"x": PerRank(own) if len(own) > 1 else own[0], **common}


def _shares(ranks: int, tokens: int, width: int = WIDTH, spread: float = 1.0) -> Make:
    """Normal shares; each rank's is ``spread`` times as large as the one before."""

    def make(rng: Rng, site: Site) -> Inputs:
        return _joined([spread**rank * rng.normal(tokens, width) for rank in range(ranks)], rng, site)

    return make


def _alone(rng: Rng, site: Site) -> Inputs:
    return {**_pair(rng, site, 7), "group": None}


def _cancelling(rng: Rng, site: Site) -> Inputs:
    """Two shares nearly undo each other: a sum in bf16 keeps none of what is left of them."""
    large, rest = 64 * rng.normal(9, WIDTH), 0.5 * rng.normal(9, WIDTH)
    inputs = _joined([large, rest, -large], rng, site)
    return {**inputs, "residual": (0.1 * rng.normal(9, WIDTH)).to(dtype_of(site))}


def _one_has_it(rng: Rng, site: Site) -> Inputs:
    """Every row's energy is in one rank's share, in one chunk of its columns: each rank and each chunk in turn."""
    rows, whole = torch.arange(24), spikes(24, WIDTH, 64, rng)
    return _joined([torch.where((rows % 4 == rank)[:, None], whole, 0.0) for rank in range(4)], rng, site)


def _broken_rows(rng: Rng, site: Site) -> Inputs:
    """Rows that are zero in all shares, NaN or infinite in one, infinite of either sign in two."""
    inputs = _shares(3, 9)(rng, site)
    for rank, x in enumerate(inputs["x"]):
        x[1] = 0
        if rank == 1:
            x[3, 7], x[5, -1], x[7, 0] = NAN, INF, INF
        if rank == 2:
            x[7, 0] = -INF
    inputs["residual"][1] = 0
    return inputs


def _bad_share(rng: Rng, site: Site) -> Inputs:
    """The last rank's share of one token is NaN, as padding is behind attention."""
    inputs = _shares(2, 5)(rng, site)
    inputs["x"][1][3] = NAN
    return inputs


def _views(rng: Rng, site: Site) -> Inputs:
    inputs = _shares(2, 6)(rng, site)
    return {**inputs, "x": PerRank(map(in_wide_row, inputs["x"])), "residual": every_other(inputs["residual"], 0)}


def _three_axes(rng: Rng, site: Site) -> Inputs:
    inputs = _shares(2, 6)(rng, site)
    x = PerRank(share.view(2, 3, WIDTH) for share in inputs["x"])
    return {**inputs, "x": x, "residual": inputs["residual"].view(2, 3, WIDTH)}


def _zero_weight(value: float) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        inputs = _shares(2, 5)(rng, site)
        return {**inputs, "weight": torch.full_like(inputs["weight"], value)}

    return make


def _reduce() -> list[Case]:
    def q(name: str, make: Make, **options: Any) -> list[Case]:
        options = {"also": ("ranks_agree",), "hidden_size": WIDTH, **options}
        return ask("allreduce_add_rms_norm", name, make, kind="sparse_attention", **options)

    return [
        *q("alone", _alone, also=("group_of_one",), hidden_size=H, quick=True, bugs=("F73",)),
        *q("ranks_2", _shares(2, 7), quick=True, bugs=("F73",)),
        *q("ranks_3", _shares(3, 7), quick=True),
        *q("ranks_4_real", _shares(4, 7, H), hidden_size=H, bugs=("F73",)),
        *q("ranks_8", _shares(8, 3), quick=True),
        *q("unequal_shares", _shares(4, 9, spread=8.0), quick=True),
        *q("cancelling", _cancelling, quick=True, input_class="cancelling", bugs=("F73",)),
        *q("one_has_it", _one_has_it, quick=True, input_class="spiked"),
        *q("broken_rows", _broken_rows, quick=True, bugs=("F28",)),
        *q("bad_share", _bad_share, quick=True, bugs=("F28",)),
        *q("strided", _views, bugs=("F65",), quick=True),
        *q("three_axes", _three_axes),
        *q("weight_minus_one", _zero_weight(-1.0), bugs=("F71",)),
        *q("weight_zero", _zero_weight(0.0), bugs=("F71",), quick=True),
        *q("large_eps", _shares(2, 5), eps=1e-1),
        *q("one_token", _shares(2, 1), bugs=("F32",), quick=True),
        *q("no_token", _shares(3, 0), bugs=("F30",), quick=True),
        *q("no_token_alone", _shares(1, 0), also=("group_of_one",), bugs=("F30",)),
        *q("tokens_130", _shares(2, 130), checks=(*LIGHT, "unbiased"), bugs=("F68",)),
    ]  # fmt: skip


Routing = Callable[[Rng, int, int], Tensor]


def _anywhere(rng: Rng, rank: int, tokens: int) -> Tensor:
    """Distinct experts of the model; every fifth choice is none."""
    ids = torch.stack([rng.permutation(EXPERTS)[:K] for _ in range(tokens)]) if tokens else torch.empty(0, K)
    ids = ids.int()
    return torch.where(torch.arange(ids.numel()).view(ids.shape) % 5 == 4, -1, ids)


def _elsewhere(rng: Rng, rank: int, tokens: int) -> Tensor:
    """No token of ranks 0 and 1 stays at home: theirs all go to the last two experts."""
    ids = torch.full((tokens, K), -1, dtype=torch.int32)
    ids[:, 1], ids[:, 3] = EXPERTS - 1, EXPERTS - 2
    return ids


def _hot(rng: Rng, rank: int, tokens: int) -> Tensor:
    """Every token of every rank goes to expert 2, and to three others in turn."""
    return ((torch.arange(tokens)[:, None] * torch.tensor([0, 1, 1, 1]) + torch.tensor([2, 3, 5, 6])) % EXPERTS).int()


def _nowhere(rng: Rng, rank: int, tokens: int) -> Tensor:
    return torch.full((tokens, K), -1, dtype=torch.int32)


def _of_many(rng: Rng, rank: int, tokens: int) -> Tensor:
    """Distinct experts of 80, the last one among them."""
    return torch.stack([torch.cat([rng.permutation(79)[: K - 1], torch.tensor([79])]) for _ in range(tokens)]).int()


def _pair_of(first: int, second: int) -> Routing:
    """These two experts alone."""
    return lambda rng, rank, tokens: torch.tensor([-1, first, -1, second], dtype=torch.int32).repeat(tokens, 1)


def _bank(rng: Rng, site: Site, format: str) -> ExpertWeights:
    """All experts, and a shared one that adds about as much as they do."""

    def drawn(count: int) -> tuple[Tensor | QTensor, Tensor | QTensor]:
        both = rng.normal(count, 2 * INNER, HIDDEN) * (3 / HIDDEN**0.5), rng.normal(count, HIDDEN, INNER) * INNER**-0.5
        w13, w2 = (_stored(w, format) if format else w.to(dtype_of(site)) for w in both)
        return w13, w2

    shared = ExpertWeights(*drawn(1)) if site.shared_intermediate_size else None
    return ExpertWeights(*drawn(site.num_experts), shared=shared)


def _slices(bank: ExpertWeights, experts: int, ranks: int) -> PerRank:
    """Each rank's experts, and the shared one on every rank."""
    step = experts // ranks
    parts = [slice(rank * step, (rank + 1) * step) for rank in range(ranks)]
    return PerRank(replace(bank, w13=bank.w13[own], w2=bank.w2[own]) for own in parts)


def _spread(tokens: Sequence[int], routing: Routing = _anywhere, *, format: str = "") -> Make:
    """Ranks with so many tokens each. Weights of absent choices are NaN."""

    def make(rng: Rng, site: Site) -> Inputs:
        x = [rng.normal(count, HIDDEN).to(dtype_of(site)) for count in tokens]
        ids = [routing(rng, rank, count) for rank, count in enumerate(tokens)]
        weights = [torch.where(own < 0, NAN, rng.uniform(0.25, 1, *own.shape)) for own in ids]
        bank = _bank(rng, site, format)
        if len(tokens) == 1:
            return {"x": x[0], "weights": weights[0], "ids": ids[0], "experts": bank, "group": None}
        spread = {"x": PerRank(x), "weights": PerRank(weights), "ids": PerRank(ids)}
        return {**spread, "experts": _slices(bank, site.num_experts, len(tokens)), "group": None}

    return make


def _changed(make: Make, change: Callable[[Inputs], Mapping[str, Any]]) -> Make:
    def changed(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site)
        return {**inputs, **change(inputs)}

    return changed


def _bad_token(inputs: Inputs) -> Mapping[str, Any]:
    """A rank's token is NaN; no other token of it, nor of another rank, may notice."""
    inputs["x"][1][2] = NAN
    return {}


def _unused_are_nan(inputs: Inputs) -> Mapping[str, Any]:
    """Experts that no token chose hold NaN."""
    for rank, experts in enumerate(inputs["experts"]):
        for expert in range(len(experts.w13)):
            if not any((ids == rank * len(experts.w13) + expert).any() for ids in inputs["ids"]):
                experts.w13[expert], experts.w2[expert] = NAN, NAN
    return {}


def _undoing(first: int, second: int) -> Make:
    """One expert undoes the other, all but a sixteenth: either rounded before they are summed would show."""
    spread = _spread((5, 4), _pair_of(first, second))

    def make(rng: Rng, site: Site) -> Inputs:
        inputs = spread(rng, site)
        count = site.num_local_experts
        one, other = (inputs["experts"][expert // count] for expert in (first, second))
        other.w13[second % count] = one.w13[first % count]
        other.w2[second % count] = -one.w2[first % count]
        for weights in inputs["weights"]:
            weights[:, 1], weights[:, 3] = 1.0625, 1.0
        return inputs

    return make


def _seen_through(inputs: Inputs) -> Mapping[str, Any]:
    """Strided rows, weights and ids."""
    wide = [torch.full((len(ids), 2 * K), 77, dtype=torch.int32) for ids in inputs["ids"]]
    for target, ids in zip(wide, inputs["ids"], strict=True):
        target[:, ::2] = ids
    return {
        "x": PerRank(map(in_wide_row, inputs["x"])),
        "weights": PerRank(every_other(own, 1) for own in inputs["weights"]),
        "ids": PerRank(own[:, ::2] for own in wide),
    }


def _numbered(inputs: Inputs) -> Mapping[str, Any]:
    """Every expert answers with its own number: expert e gives 7 * (e + 1) in each column, whatever the token."""
    count = len(inputs["experts"][0].w13)
    for rank, experts in enumerate(inputs["experts"]):
        experts.w13.zero_()
        experts.w13[:, :INNER, 0] = 100.0  # a gate beyond the limit: 7, as x's first column is positive
        experts.w2.zero_()
        experts.w2[:, :, 0] = (torch.arange(count) + rank * count + 1.0)[:, None].to(experts.w2.dtype)
    for x in inputs["x"]:
        x[:, 0] = 2.0
    return {}


def _mega() -> list[Case]:
    def q(name: str, make: Make, ranks: int, **options: Any) -> list[Case]:
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts": EXPERTS, "top_k_experts": K}
        own = {"num_local_experts": EXPERTS // ranks, "shared_intermediate_size": INNER, "shared_format": str}
        return ask("mega_moe", name, make, kind="moe", **{**sizes, **own, **options})

    three = {"also": ("exchanged_ranks",), "quick": True}
    routed: dict[str, Any] = {"shared_intermediate_size": 0, "shared_format": ""}
    uneven = _spread((5, 0, 9, 2))
    return [
        *q("alone", _spread((9,)), 1, also=("group_of_one",), quick=True),
        *q("alone_routed", _spread((17,), _hot), 1, also=("group_of_one",), **routed),
        *q("ranks_2", _spread((9, 9)), 2, bugs=("F43",), **three),
        *q("uneven", uneven, 4, bugs=("F31", "F43"), **three),
        *q("uneven_routed", uneven, 4, quick=True, **routed),
        *q("one_expert_each", _spread((3, 1, 0, 2, 2, 0, 4, 1)), 8, bugs=("F43",)),
        *q("all_elsewhere", _spread((6, 3, 0, 0), _elsewhere), 4, bugs=("F31",), quick=True),
        *q("hot_expert", _spread((33, 17), _hot), 2, bugs=("F31",), **three),
        *q("hot_alone", _spread((64,), _hot), 1, checks=LIGHT, bugs=("F31",)),
        *q("nowhere", _spread((3, 2), _nowhere), 2, bugs=("F29",), quick=True),
        *q("nowhere_routed", _spread((3, 2), _nowhere), 2, bugs=("F29",), quick=True, **routed),
        *q("numbered", _changed(_spread((4, 7)), _numbered), 2, bugs=("F43",), **{**three, **routed}),
        *q("bad_token", _changed(_spread((3, 5)), _bad_token), 2, bugs=("F28", "F32"), **three),
        *q("unused_are_nan", _changed(_spread((4, 4), _elsewhere), _unused_are_nan), 2, bugs=("F29",), quick=True),
        *q("strided", _changed(_spread((5, 3)), _seen_through), 2, bugs=("F65",), quick=True, **routed),
        *q("cancelling", _undoing(1, 6), 2, input_class="cancelling", bugs=("F73",), **three, **routed),
        *q("cancelling_here", _undoing(1, 2), 2, input_class="cancelling_here", bugs=("F73",), **three, **routed),
        *q("experts_80", _spread((5, 3), _of_many), 2, num_experts=80, num_local_experts=40,
           checks=(*LIGHT, "exchanged_ranks")),
        *q("tokens_320", _spread((290, 30), _hot), 2, checks=(*LIGHT, "exchanged_ranks"), bugs=("F68",)),
        *q("other_constants", _spread((4, 3)), 2, alpha=0.5, beta=0.0, limit=1.0, bugs=("F04", "F02")),
        *q("one_token", _spread((0, 1)), 2, bugs=("F32",), quick=True),
        *q("no_token", _spread((0, 0)), 2, bugs=("F30",), quick=True),
        *[case for format in ("fp8_e4m3", "mxfp8", "mxfp4", "nvfp4")
          for case in q(f"{format}_ranks_2", _spread((5, 3), format=format), 2, weight_format=format,
                        shared_format=format, checks=(*LIGHT, "exchanged_ranks"))],
    ]  # fmt: skip


CASES = [*_reduce(), *_mega()]
