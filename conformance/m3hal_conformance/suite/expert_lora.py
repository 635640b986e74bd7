"""``moe_experts`` with adapters: several in a batch, any rank, and what no token takes holds NaN.

An adapter adds about half as much as its experts do, and each has another scale.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal.ops import ExpertLoRA, ExpertWeights
from m3hal_conformance.case import Case, Inputs, Make, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask, column_major, every_other, in_wide_row
from m3hal_conformance.suite.experts import EXPERTS, NAN, H, Routing, _hot, _in_turn, _moe_inputs, _spread, _twice
from m3hal_conformance.suite.quantised import STORED, _stored
from m3hal_conformance.suite.shared_expert import _added, _own

HIDDEN, INNER, ADAPTERS = 64, 32, 3


def _adapters(rng: Rng, site: Site, tokens: int, hidden: int, inner: int, count: int = ADAPTERS) -> ExpertLoRA:
    """Adapters of the site's rank; their order in the batch is random, a quarter of the tokens has none."""
    rank = site.lora_rank

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        drawn: Tensor = rng.normal(count, EXPERTS, *shape) * (size * shape[-1] ** -0.5)
        return drawn.to(dtype_of(site))

    factors = draw(rank, hidden), draw(2 * inner, rank, size=0.5), draw(rank, inner), draw(hidden, rank, size=0.5)
    chosen = torch.where(rng.uniform(0, 1, tokens) < 0.25, -1, rng.integers(0, count, tokens)).int()
    scales = torch.tensor([0.5, 1.5, 1.0]).repeat(-(-count // 3))[:count]
    return ExpertLoRA(*factors, scales, chosen)


def _adapted(make: Make, count: int = ADAPTERS) -> Make:
    """The inputs of another case, and adapters."""

    def adapted(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site)
        tokens, hidden = inputs["x"].shape
        return {**inputs, "lora": _adapters(rng, site, tokens, hidden, site.intermediate_size, count)}

    return adapted


def _inputs(tokens: int, routing: Routing, count: int = ADAPTERS) -> Make:
    return _adapted(_moe_inputs(tokens, routing, HIDDEN, INNER), count)


def _formatted(format: str) -> Make:
    def made(rng: Rng, site: Site) -> Inputs:
        inputs = _moe_inputs(17, _hot, HIDDEN, INNER)(rng, site)
        w13 = rng.normal(EXPERTS, 2 * INNER, HIDDEN) * (2 / HIDDEN**0.5)
        w2 = rng.normal(EXPERTS, HIDDEN, INNER) * INNER**-0.5
        return {**inputs, "experts": ExpertWeights(_stored(w13, format), _stored(w2, format))}

    return _adapted(made)


_FACTORS = ("a13", "b13", "a2", "b2")


def _with_nan(lora: ExpertLoRA, unused: Tensor) -> ExpertLoRA:
    """NaN where ``unused`` [L, E] says so, and in the scales of adapters that nobody uses."""
    factors = {name: getattr(lora, name).masked_fill(unused[:, :, None, None], NAN) for name in _FACTORS}
    return replace(lora, **factors, scales=lora.scales.masked_fill(unused.all(1), NAN))


def _nobody(rng: Rng, site: Site) -> Inputs:
    """No token has an adapter, and all that there are hold NaN."""
    inputs = _inputs(17, _hot)(rng, site)
    lora = _with_nan(inputs["lora"], torch.ones(ADAPTERS, EXPERTS, dtype=torch.bool))
    return {**inputs, "lora": replace(lora, adapters=torch.full((17,), -1, dtype=torch.int32))}


def _unused_are_nan(rng: Rng, site: Site) -> Inputs:
    """Nobody has adapter 1; of the others NaN stands wherever no token with the adapter takes the expert."""
    inputs = _inputs(9, _spread)(rng, site)
    lora = inputs["lora"]
    chosen = torch.where(lora.adapters == 1, 2, lora.adapters)
    unused = torch.ones(ADAPTERS, EXPERTS, dtype=torch.bool)
    for adapter, ids in zip(chosen.tolist(), inputs["ids"].tolist(), strict=True):
        for expert in ids if adapter >= 0 else ():
            if expert >= 0:
                unused[adapter, expert] = False
    return {**inputs, "lora": replace(_with_nan(lora, unused), adapters=chosen)}


def _absent(rng: Rng, site: Site) -> Inputs:
    """Every token has an adapter; half of them have no expert here, and zeros come out."""
    inputs = _inputs(12, _hot)(rng, site)
    inputs["ids"][::2] = -1
    adapters = (torch.arange(12) % ADAPTERS).int()
    return {**inputs, "lora": replace(inputs["lora"], adapters=adapters)}


def _alone(rng: Rng, site: Site) -> Inputs:
    """Experts of zeros: nothing but what adapters add, so that no sum hides it. gate and up come from b13 alone."""
    inputs = _adapted(_moe_inputs(17, _in_turn, 256, 96))(rng, site)
    experts = inputs["experts"]
    zeros = ExpertWeights(torch.zeros_like(experts.w13), torch.zeros_like(experts.w2))
    return {**inputs, "experts": zeros}


def _cancelling(rng: Rng, site: Site) -> Inputs:
    """The adapters undo the first product, all but a sixteenth: either rounded to bf16 before they meet would show.

    Every number of the adapters has few bits, so that operands of matrix units lose none.
    """
    inputs = _inputs(9, _hot)(rng, site)
    whole = rng.integers(-8, 9, EXPERTS, 2 * INNER, HIDDEN) / 8.0
    eye = torch.eye(HIDDEN).expand(1, EXPERTS, -1, -1)
    none = torch.zeros(1, EXPERTS, HIDDEN, INNER), torch.zeros(1, EXPERTS, HIDDEN, HIDDEN)
    a13, b13, a2, b2 = (factor.to(dtype_of(site)).contiguous() for factor in (eye, whole[None] * (-15 / 16), *none))
    lora = ExpertLoRA(a13, b13, a2, b2, torch.ones(1), torch.zeros(9, dtype=torch.int32))
    experts = replace(inputs["experts"], w13=whole.to(dtype_of(site)))
    return {**inputs, "experts": experts, "lora": lora}


def _beside_shared(rng: Rng, site: Site) -> Inputs:
    """The shared expert has no adapter."""
    inputs = _inputs(17, _hot)(rng, site)
    return {**inputs, "experts": replace(inputs["experts"], shared=_own(rng, site))}


def _none(rng: Rng, site: Site) -> Inputs:
    """A batch without adapters at a site that has some."""
    return {**_moe_inputs(7, _hot, HIDDEN, INNER)(rng, site), "lora": None}


def _bad_token(rng: Rng, site: Site) -> Inputs:
    """A token of NaN shares adapter and experts with others."""
    inputs = _inputs(9, _hot)(rng, site)
    inputs["x"][4] = NAN
    return {**inputs, "lora": replace(inputs["lora"], adapters=torch.full((9,), 1, dtype=torch.int32))}


def _views(rng: Rng, site: Site) -> Inputs:
    """Factors that are parts of larger pools, every other adapter of a batch; scales need more bits than bf16 has."""
    inputs = _inputs(17, _hot)(rng, site)
    lora = inputs["lora"]
    views = ExpertLoRA(
        in_wide_row(lora.a13),
        every_other(lora.b13, 0),
        every_other(lora.a2, 1),
        column_major(lora.b2),
        every_other(torch.tensor([0.53, -1.47, 3.09]), 0),
        every_other(torch.where(lora.adapters < 0, -5, lora.adapters), 0),
    )
    return {**inputs, "lora": views}


def _many(rng: Rng, site: Site) -> Inputs:
    """More tokens than a decode step has, beside a shared expert; their adapters stand in every other place."""
    inputs = _added(_inputs(300, _hot))(rng, site)
    lora = inputs["lora"]
    return {**inputs, "lora": replace(lora, adapters=every_other(lora.adapters, 0))}


def _cases() -> list[Case]:
    def q(name: str, make: Make, rank: int = 32, **options: Any) -> list[Case]:
        sized: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
        asked = {"kind": "moe", "input_class": "lora", **sized, "lora_rank": rank, **options}
        return ask("moe_experts", f"lora_{name}", make, **asked)

    cases: list[Case] = []
    for rank in (1, 5, 33, 64, 144):
        cases += q(
            f"rank_{rank}",
            _inputs(9, _hot),
            rank,
            checks=LIGHT,
            also=("permuted_rows",),
            bugs=("F59",),
            quick=rank in (1, 5),
        )
    for format in STORED:
        cases += q(f"{format}_experts", _formatted(format), 16, weight_format=format, checks=LIGHT, bugs=("F57",),
                   quick=format == "mxfp8")  # fmt: skip
    shared: dict[str, Any] = {"shared_intermediate_size": 96, "shared_format": lambda dtype: dtype}
    real: dict[str, Any] = {"hidden_size": H, "intermediate_size": 384, "checks": ("oracle", "written", "guards")}
    return [
        *cases,
        *q("real_tp8", _adapted(_moe_inputs(6, _hot, H, 384, real=True), 2), **real),
        *q("adapters", _inputs(17, _hot), quick=True, bugs=("F05",), also=("permuted_rows", "permuted_experts",
           "row_alone")),
        *q("few_resident", _inputs(33, _spread), also=("expert_slices",), bugs=("F29", "F43"), quick=True),
        *q("nobody", _nobody, also=("without_lora",), bugs=("F29",), quick=True),
        *q("none", _none, quick=True),
        *q("unused_are_nan", _unused_are_nan, bugs=("F29",), quick=True),
        *q("absent_expert", _absent, bugs=("F29",), quick=True),
        *q("alone", _alone, hidden_size=256, intermediate_size=96, input_class="lora_alone", bugs=("F05",),
           quick=True),
        *q("cancelling", _cancelling, HIDDEN, input_class="lora_cancelling", bugs=("F73",), checks=LIGHT,
           also=("permuted_rows",), quick=True),
        *q("beside_shared", _beside_shared, also=("permuted_rows", "expert_slices"), quick=True, **shared),
        *q("bad_token", _bad_token, bugs=("F28",), quick=True),
        *q("one_adapter", _inputs(9, _hot, 1), checks=LIGHT),
        *q("views", _views, bugs=("F65",), checks=LIGHT, also=("permuted_rows",), quick=True),
        *q("adapters_16", _inputs(65, _in_turn, 16), 4, checks=LIGHT),
        *q("adapters_70", _inputs(129, _in_turn, 70), 2, checks=LIGHT, also=("permuted_rows",), bugs=("F68",)),
        *q("beside_shared_300", _many, checks=LIGHT, also=("permuted_rows",), bugs=("F68",),
           **shared),
        *q("twice_the_same", _inputs(9, _twice), checks=LIGHT),
        *q("other_constants", _inputs(9, _hot), alpha=0.5, beta=0.5, limit=1.0, checks=LIGHT, bugs=("F02", "F04")),
        *q("one_token", _inputs(1, _hot), bugs=("F32",)),
        *q("no_token", _inputs(0, _hot), bugs=("F30",)),
    ]  # fmt: skip


CASES = _cases()
