"""``route_topk`` and ``moe_experts``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from m3hal.ops import ExpertWeights
from m3hal_conformance.case import Case, Inputs, Make, Rng, Site, dtype_of
from m3hal_conformance.inputs import hot_routing
from m3hal_conformance.suite._build import LIGHT, ask, every_other, in_wide_row, spikes

NAN, INF = float("nan"), float("inf")
ONE = ("float32",)  # logits are fp32 at every site
H, EXPERTS = 6144, 8


def _logits(tokens: int, spread: float = 1.0, bias: float = 0.1, experts: int = 128) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        return {"logits": spread * rng.normal(tokens, experts), "bias": bias * rng.normal(experts)}

    return make


def _rows(make: Callable[[Rng], tuple[Tensor, Tensor]]) -> Make:
    return lambda rng, site: dict(zip(("logits", "bias"), make(rng), strict=True))


def _broken_rows(rng: Rng, site: Site) -> Inputs:
    """A padded row of NaN, rows with one NaN, with infinities, between ordinary ones."""
    inputs = _logits(9)(rng, site)
    logits = inputs["logits"]
    logits[1] = NAN
    logits[3, 17], logits[4, 5] = NAN, INF
    logits[5, :100], logits[6] = -INF, -INF
    logits[7, ::2] = NAN
    return inputs


def _published(rng: Rng, site: Site) -> Inputs:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0]])
    return {"logits": logits, "bias": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.9, 0.8, 0.7, 0.6])}


def _published_out(inputs: Inputs) -> Mapping[str, Tensor]:
    """Weights from the sigmoid alone; the order is that of sigmoid + bias: 4 (1.019), 0 (.881), 5 (.847), 1 (.731)."""
    return {
        "ids": torch.tensor([[4, 0, 5, 1]]),
        "weights": torch.tensor([[0.134050, 0.990503, 0.053333, 0.822114]]),
    }


def _far_apart(rng: Rng) -> tuple[Tensor, Tensor]:
    """Biases of 12 to 35, far above any sigmoid: a weight won back as (score + bias) - bias has no digits left."""
    return 2 * rng.normal(7, 128) - 4, rng.uniform(12, 35, 128)


def _ties(rng: Rng) -> tuple[Tensor, Tensor]:
    return rng.integers(0, 3, 17, 128).float(), torch.zeros(128)


def _saturated(rng: Rng) -> tuple[Tensor, Tensor]:
    """Logits of +-100: sigmoids of 1 and of 0, in fp32."""
    return torch.where(rng.normal(9, 128) > 0, 100.0, -100.0) + rng.normal(9, 128), 0.1 * rng.normal(128)


def _vanishing(rng: Rng) -> tuple[Tensor, Tensor]:
    """All sigmoids of a row are zero in fp32: its weights are zeros, not NaN."""
    logits = rng.normal(4, 128)
    logits[1] -= 300
    logits[3] = -INF
    return logits, 0.1 * rng.normal(128)


def _route() -> list[Case]:
    def q(name: str, make: Any, **options: Any) -> list[Case]:
        return ask("route_topk", name, make, kind="moe", dtypes=ONE, **options)

    return [
        *q("tokens_65", _logits(65), also=("row_alone", "permuted_rows"), quick=True),
        *q("tokens_1000", _logits(1000), checks=LIGHT),
        *q("published_numbers", _published, golden=_published_out, bugs=("F38",), num_experts=8, quick=True),
        *q("bias_decides", _logits(33, 0.5, 2.0), bugs=("F38",), quick=True),
        *q("bias_far_above", _rows(_far_apart), bugs=("F38",), input_class="biased", quick=True),
        *q("ties", _rows(_ties), bugs=("F16",), quick=True),
        *q("all_equal", _rows(lambda r: (torch.zeros(5, 128), torch.zeros(128))), bugs=("F16",), quick=True),
        *q("saturated", _rows(_saturated), quick=True),
        *q("vanishing", _rows(_vanishing), bugs=("F28",), quick=True),
        *q("broken_rows", _broken_rows, bugs=("F28",), also=("row_alone", "permuted_rows"), quick=True),
        *q("all_negative", _rows(lambda r: (-8 + r.normal(9, 128), -0.5 + 0.1 * r.normal(128))), bugs=("F17",),
           quick=True),
        *q("scale_1", _logits(9), routed_scale=1.0, bugs=("F36",)),
        *q("scale_2_sums_to_2", _logits(9), golden=None, bugs=("F36",)),
        *q("not_renormalized", _logits(9), renormalize=False, routed_scale=1.5, bugs=("F33",), quick=True),
        *q("top_1", _logits(9), top_k_experts=1, routed_scale=1.5, bugs=("F33",)),
        *q("tokens_equal_experts", _logits(128)),
        *q("four_experts", _logits(5, experts=4), num_experts=4),
        *q("fused_row", lambda r, s: {**_logits(9)(r, s), "logits": in_wide_row(_logits(9)(r, s)["logits"])},
           bugs=("F65",), quick=True),
        *q("every_other_row", lambda r, s: {**_logits(9)(r, s), "logits": every_other(_logits(9)(r, s)["logits"], 0)},
           bugs=("F65",), quick=True),
        *q("one_token", _logits(1), bugs=("F32",), quick=True),
        *q("no_token", _logits(0), bugs=("F30",), quick=True),
    ]  # fmt: skip


@cache
def _large(dtype: torch.dtype, experts: int, hidden: int, inner: int) -> ExpertWeights:
    """Weights of the real size, drawn once per process; cases read them and never write."""
    generator = torch.Generator().manual_seed(7)
    w13 = torch.empty(experts, 2 * inner, hidden, dtype=dtype).normal_(generator=generator).mul_(hidden**-0.5)
    return ExpertWeights(
        w13, torch.empty(experts, hidden, inner, dtype=dtype).normal_(generator=generator).mul_(inner**-0.5)
    )


def _weights(rng: Rng, site: Site, hidden: int, inner: int, experts: int = EXPERTS) -> ExpertWeights:
    w13 = rng.normal(experts, 2 * inner, hidden) * (2 / hidden**0.5)
    return ExpertWeights(w13.to(dtype_of(site)), (rng.normal(experts, hidden, inner) * inner**-0.5).to(dtype_of(site)))


Routing = Callable[[Rng, int], tuple[Tensor, Tensor]]


def _hot(rng: Rng, tokens: int) -> tuple[Tensor, Tensor]:
    """Expert 1 in every row, the last expert in none."""
    if tokens == 0:
        return torch.empty(0, 4), torch.empty(0, 4, dtype=torch.int32)
    return hot_routing(tokens, EXPERTS, 4, rng.generator)


def _spread(rng: Rng, tokens: int) -> tuple[Tensor, Tensor]:
    """8 of 128 experts live here: most ids are -1, and their weights are NaN."""
    weights, ids = _hot(rng, tokens)
    absent = rng.uniform(0, 1, tokens, 4) < 0.6
    if tokens > 2:
        absent[1], absent[2] = True, False
    return torch.where(absent, NAN, weights), torch.where(absent, -1, ids)


def _all_on_one(rng: Rng, tokens: int) -> tuple[Tensor, Tensor]:
    """Every token goes to expert 3 and, with the rest of its choices, nowhere."""
    ids = torch.full((tokens, 4), -1, dtype=torch.int32)
    ids[:, 2] = 3
    return rng.uniform(0.5, 1.5, tokens, 4), ids


def _twice(rng: Rng, tokens: int) -> tuple[Tensor, Tensor]:
    """The same expert in two slots of a row counts twice."""
    weights, ids = _hot(rng, tokens)
    ids[:, 3] = ids[:, 0]
    return weights, ids


def _in_turn(rng: Rng, tokens: int) -> tuple[Tensor, Tensor]:
    """Every expert in its turn, the last one too."""
    ids = (torch.arange(tokens)[:, None] + torch.tensor([0, 3, 5, 6])) % EXPERTS
    return rng.uniform(0.25, 1, tokens, 4), ids.int()


def _nowhere(rng: Rng, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.full((tokens, 4), NAN), torch.full((tokens, 4), -1, dtype=torch.int32)


def _moe_inputs(tokens: int, routing: Routing, hidden: int = 256, inner: int = 96, *, real: bool = False) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        weights, ids = routing(rng, tokens)
        experts = _large(dtype_of(site), EXPERTS, hidden, inner) if real else _weights(rng, site, hidden, inner)
        return {"x": rng.normal(tokens, hidden).to(dtype_of(site)), "weights": weights, "ids": ids, "experts": experts}

    return make


def _unused_are_nan(rng: Rng, site: Site) -> Inputs:
    """Experts that no token chose, the last one among them, hold NaN."""
    inputs = _moe_inputs(9, _spread)(rng, site)
    used = set(inputs["ids"].flatten().tolist())
    for expert in range(EXPERTS):
        if expert not in used:
            inputs["experts"].w13[expert], inputs["experts"].w2[expert] = NAN, NAN
    assert EXPERTS - 1 not in used
    return inputs


def _identity(rng: Rng, site: Site) -> Inputs:
    """Experts whose output is their input's first half times (up + 1): routing weights of 2.0 in all give x doubled."""
    hidden = 128
    w13 = torch.zeros(EXPERTS, 2 * hidden, hidden)
    w13[:, :hidden] = torch.eye(hidden)
    w2 = torch.eye(hidden).expand(EXPERTS, -1, -1).clone()
    weights, ids = _hot(rng, 6)
    experts = ExpertWeights(w13.to(dtype_of(site)), w2.to(dtype_of(site)))
    return {"x": rng.uniform(1, 2, 6, hidden).to(dtype_of(site)), "weights": weights, "ids": ids, "experts": experts}


def _clamped(rng: Rng, site: Site) -> Inputs:
    """Gate and up values of 6.9, 7, 7.1 and 50, of both signs, reach the activation: F03 through the whole operator."""
    hidden = 64
    values = torch.tensor([6.9, 7.0, 7.1, 50.0, -6.9, -7.1, -50.0, 0.5])
    w13 = torch.zeros(EXPERTS, 2 * 64, hidden)
    w13[:, :64, 0] = values.repeat(8)
    w13[:, 64:, 1] = values.repeat_interleave(8)
    x = torch.zeros(5, hidden)
    x[:, :2] = 1
    x[1, 0], x[2, 1], x[3] = 0.5, -1, 0
    weights, ids = _hot(rng, 5)
    experts = ExpertWeights(w13.to(dtype_of(site)), (rng.normal(EXPERTS, hidden, 64) * 0.2).to(dtype_of(site)))
    return {"x": x.to(dtype_of(site)), "weights": weights, "ids": ids, "experts": experts}


def _published_halves(rng: Rng, site: Site) -> Inputs:
    """x @ w13^T = [1, 2, 3, 4]: read as [gate | up] it activates to [3.383183, 9.678293]."""
    w13 = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1).expand(EXPERTS, -1, -1).clone()
    w2 = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[:1].expand(EXPERTS, 1, 2).clone()
    w2[1::2] = torch.tensor([0.0, 1.0])
    ids = torch.tensor([[0, -1], [1, -1]], dtype=torch.int32)
    experts = ExpertWeights(w13.to(dtype_of(site)), w2.to(dtype_of(site)))
    return {"x": torch.ones(2, 1).to(dtype_of(site)), "weights": torch.ones(2, 2), "ids": ids, "experts": experts}


def _published_halves_out(inputs: Inputs) -> Mapping[str, Tensor]:
    return {"out": torch.tensor([[3.383183], [9.678293]])}


def _spiked(rng: Rng, site: Site) -> Inputs:
    """Every chunk of the hidden size decides one token."""
    inputs = _moe_inputs(8, _hot, 512, 64)(rng, site)
    return {**inputs, "x": spikes(8, 512, 64, rng).to(dtype_of(site))}


def _bad_token(rng: Rng, site: Site) -> Inputs:
    """One token is NaN, as padded rows are after attention; the others must not notice."""
    inputs = _moe_inputs(9, _hot)(rng, site)
    inputs["x"][4] = NAN
    return inputs


def _unequal(rng: Rng, site: Site) -> Inputs:
    """One expert's outputs are a thousand times the others': its weight must meet its own output."""
    inputs = _moe_inputs(17, _hot)(rng, site)
    inputs["experts"].w2[2] *= 1000
    return inputs


def _strided(rng: Rng, site: Site) -> Inputs:
    inputs = _moe_inputs(9, _hot)(rng, site)
    ids = every_other(inputs["ids"].float(), 0)
    wide = torch.full((9, 8), 77, dtype=torch.int32)
    wide[:, ::2] = inputs["ids"]
    del ids
    return {**inputs, "x": in_wide_row(inputs["x"]), "weights": every_other(inputs["weights"], 1), "ids": wide[:, ::2]}


def _moe() -> list[Case]:
    def q(name: str, make: Any, **options: Any) -> list[Case]:
        small = {"hidden_size": 256, "intermediate_size": 96, "num_local_experts": EXPERTS, **options}
        return ask("moe_experts", name, make, kind="moe", **small)

    real: dict[str, Any] = {"hidden_size": H, "intermediate_size": 384, "checks": ("oracle", "written", "guards")}
    return [
        *q("real_tp8", _moe_inputs(6, _hot, H, 384, real=True), input_class="real", **real),
        *q("real_decode", _moe_inputs(1, _spread, H, 384, real=True), input_class="real", **real),
        *q("hot_expert", _moe_inputs(17, _hot), also=("permuted_rows", "permuted_experts", "packed_once",
           "updated_weights"), quick=True,
           bugs=("F31", "F05")),
        *q("every_expert", _moe_inputs(16, _in_turn), quick=True, bugs=("F31",),
           also=("permuted_rows", "updated_weights")),
        *q("few_resident", _moe_inputs(33, _spread), also=("expert_slices", "row_alone"), bugs=("F29", "F31", "F43"),
           quick=True),
        *q("all_on_one", _moe_inputs(64, _all_on_one), bugs=("F31",), quick=True),
        *q("all_on_one_512", _moe_inputs(512, _all_on_one), checks=LIGHT, bugs=("F31",)),
        *q("unused_are_nan", _unused_are_nan, bugs=("F29",), quick=True),
        *q("nowhere", _moe_inputs(5, _nowhere), bugs=("F29", "F31"), quick=True),
        *q("twice_the_same", _moe_inputs(9, _twice), quick=True),
        *q("identity", _identity, bugs=("F36", "F37", "F42"), hidden_size=128, intermediate_size=128, quick=True),
        *q("clamped", _clamped, bugs=("F01", "F03"), hidden_size=64, intermediate_size=64, quick=True,
           input_class="clamped"),
        *q("published_halves", _published_halves, bugs=("F05",), golden=_published_halves_out, hidden_size=1,
           intermediate_size=2, top_k_experts=2, quick=True),
        *q("other_constants", _moe_inputs(9, _hot), alpha=0.5, beta=0.0, limit=1.0, bugs=("F04", "F02"), quick=True),
        *q("every_chunk", _spiked, hidden_size=512, intermediate_size=64, input_class="spiked", quick=True,
           bugs=("F59",)),
        *q("inner_416", _moe_inputs(7, _hot, 256, 416), intermediate_size=416, bugs=("F59",)),
        *q("inner_32", _moe_inputs(7, _hot, 96, 32), hidden_size=96, intermediate_size=32, bugs=("F59",)),
        *q("bad_token", _bad_token, bugs=("F28", "F32"), quick=True, also=("permuted_rows",)),
        *q("unequal_experts", _unequal, input_class="unequal", quick=True),
        *q("rows_alone", _moe_inputs(130, _hot), checks=("oracle", "row_alone"), bugs=("F32",)),
        *q("strided", _strided, bugs=("F65",), quick=True),
        *q("one_token", _moe_inputs(1, _hot), bugs=("F32",), quick=True),
        *q("no_token", _moe_inputs(0, _hot), bugs=("F30",), quick=True),
        *q("tokens_equal_experts", _moe_inputs(8, _hot)),
    ]  # fmt: skip


CASES = [*_route(), *_moe()]
