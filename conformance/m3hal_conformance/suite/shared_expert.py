"""``moe_experts`` with a shared expert: every token takes it once, with weight 1, before the one rounding.

It is larger than a routed expert, reaches the activation's limits, and adds about as much as they do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal.formats import QTensor
from m3hal.ops import ExpertWeights
from m3hal_conformance.case import Case, Inputs, Make, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask, column_major, in_wide_row
from m3hal_conformance.suite.experts import EXPERTS, NAN, H, Routing, _bad_token, _hot, _moe_inputs, _nowhere, _spread
from m3hal_conformance.suite.quantised import STORED, _stored

HIDDEN, INNER, SHARED = 64, 32, 96
#: storage formats of the routed experts and of a shared one that checkpoints and kernels combine
MIXED = (("nvfp4", "mxfp8"), ("nvfp4", ""), ("mxfp4", "mxfp8"), ("fp8_e4m3", ""))


def _in(format: str, weight: Tensor, site: Site) -> Tensor | QTensor:
    """A weight in a storage format, or as it is in the site's dtype."""
    return _stored(weight, format) if format else weight.to(dtype_of(site))


def _own(rng: Rng, site: Site, format: str = "", inner: int = SHARED, hidden: int = HIDDEN) -> ExpertWeights:
    """A shared expert; a twelfth of its gates and of its ups are beyond 7."""
    w13, w2 = rng.normal(1, 2 * inner, hidden) * (4 / hidden**0.5), rng.normal(1, hidden, inner) * (0.5 * inner**-0.5)
    return ExpertWeights(_in(format, w13, site), _in(format, w2, site))


def _added(make: Make, format: str = "", inner: int = SHARED) -> Make:
    """The inputs of another case, and a shared expert."""

    def added(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site)
        own = _own(rng, site, format, inner, inputs["x"].shape[1])
        return {**inputs, "experts": replace(inputs["experts"], shared=own)}

    return added


def _inputs(tokens: int, routing: Routing, inner: int = SHARED) -> Make:
    return _added(_moe_inputs(tokens, routing, HIDDEN, INNER), inner=inner)


def _formats(format: str, shared: str) -> Make:
    """Routed experts in one format, the shared one in another; "" is the site's dtype."""

    def made(rng: Rng, site: Site) -> Inputs:
        inputs = _moe_inputs(17, _hot, HIDDEN, INNER)(rng, site)
        w13 = rng.normal(EXPERTS, 2 * INNER, HIDDEN) * (2 / HIDDEN**0.5)
        w2 = rng.normal(EXPERTS, HIDDEN, INNER) * INNER**-0.5
        own = _own(rng, site, shared)
        experts = ExpertWeights(_in(format, w13, site), _in(format, w2, site), shared=own)
        return {**inputs, "experts": experts}

    return made


def _scaled(rng: Rng, site: Site) -> Inputs:
    """Either expert's checkpoint scales are its own: quantised activations are divided by these and no others."""
    inputs = _formats("nvfp4", "nvfp4")(rng, site)
    experts = inputs["experts"]
    own = replace(experts.shared, x_scale=torch.tensor(0.02), hidden_scale=torch.tensor(0.15))
    experts = replace(experts, x_scale=torch.tensor(0.013), hidden_scale=torch.tensor(0.11), shared=own)
    return {**inputs, "experts": experts}


def _cancelling(rng: Rng, site: Site) -> Inputs:
    """The shared expert undoes the routed one, all but a sixteenth: either sum rounded alone would show."""
    inputs = _moe_inputs(9, _hot, HIDDEN, INNER)(rng, site)
    w13, w2 = inputs["experts"].w13, inputs["experts"].w2
    ids = torch.full((9, 4), -1, dtype=torch.int32)
    ids[:, 1] = 3
    weights = torch.full((9, 4), 1.0625)
    own = ExpertWeights(w13[3:4].clone(), -w2[3:4].clone())
    return {**inputs, "weights": weights, "ids": ids, "experts": replace(inputs["experts"], shared=own)}


def _unrouted_are_nan(rng: Rng, site: Site) -> Inputs:
    """No token has an expert here, all of them hold NaN, and so do their weights: the shared expert is all there is."""
    inputs = _inputs(5, _nowhere)(rng, site)
    experts = inputs["experts"]
    nan = replace(experts, w13=torch.full_like(experts.w13, NAN), w2=torch.full_like(experts.w2, NAN))
    return {**inputs, "experts": nan}


def _views(rng: Rng, site: Site) -> Inputs:
    """The shared expert's matrices as parts of wider ones."""
    inputs = _inputs(7, _hot)(rng, site)
    own = inputs["experts"].shared
    own = replace(own, w13=in_wide_row(own.w13), w2=column_major(own.w2))
    return {**inputs, "experts": replace(inputs["experts"], shared=own)}


def _none(rng: Rng, site: Site) -> Inputs:
    """A site with a shared expert, on a rank that does not hold it."""
    return _moe_inputs(7, _hot, HIDDEN, INNER)(rng, site)


def _cases() -> list[Case]:
    def q(name: str, make: Make, **options: Any) -> list[Case]:
        sized: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
        own = {"shared_intermediate_size": SHARED, "shared_format": lambda dtype: dtype}
        asked = {"kind": "moe", "input_class": "shared", **sized, **own, **options}
        return ask("moe_experts", f"shared_{name}", make, **asked)

    def stored(format: str, shared: str) -> list[Case]:
        name = f"{shared or 'plain'}_beside_{format}"
        asked = {} if not shared else {"shared_format": shared}
        return q(name, _formats(format, shared), weight_format=format, bugs=("F57",), checks=LIGHT,
                 quick=(format, shared) == MIXED[0], **asked)  # fmt: skip

    cases = [case for format, shared in (*((f, f) for f in STORED), *MIXED) for case in stored(format, shared)]
    real: dict[str, Any] = {"hidden_size": H, "intermediate_size": 384, "checks": ("oracle", "written", "guards")}
    return [
        *cases,
        *q("real_tp8", _added(_moe_inputs(6, _hot, H, 384, real=True), inner=384), shared_intermediate_size=384,
           **real),
        *q("scaled", _scaled, weight_format="nvfp4", shared_format="nvfp4", bugs=("F57",), checks=LIGHT),
        *q("hot", _inputs(17, _hot), quick=True, bugs=("F36",), also=("permuted_rows", "permuted_experts",
           "packed_once", "updated_weights")),
        *q("few_resident", _inputs(33, _spread), also=("expert_slices", "row_alone", "packed_once",
           "updated_weights"), bugs=("F43", "F29"), quick=True),
        *q("nowhere", _unrouted_are_nan, bugs=("F29",), quick=True),
        *q("cancelling", _cancelling, input_class="shared_cancelling", also=("permuted_rows", "row_alone"),
           bugs=("F73",), quick=True, shared_intermediate_size=INNER),
        *q("other_constants", _inputs(9, _hot), alpha=0.5, beta=0.0, limit=1.0, bugs=("F02", "F04")),
        *q("inner_416", _inputs(7, _hot, 416), shared_intermediate_size=416, bugs=("F59",)),
        *q("inner_32", _inputs(7, _hot, 32), shared_intermediate_size=32, bugs=("F59",)),
        *q("bad_token", _added(_bad_token), hidden_size=256, intermediate_size=96, bugs=("F28",), quick=True),
        *q("none", _none, quick=True),
        *q("views", _views, bugs=("F65",), checks=LIGHT, also=("permuted_rows",)),
        *q("tokens_130", _inputs(130, _hot), checks=("oracle", "row_alone"), bugs=("F32",)),
        *q("one_token", _inputs(1, _hot), bugs=("F32",)),
        *q("no_token", _inputs(0, _hot), bugs=("F30",)),
    ]  # fmt: skip


CASES = _cases()
