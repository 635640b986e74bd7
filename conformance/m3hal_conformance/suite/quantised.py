"""Stored weights and activations, in every format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from m3hal import formats
from m3hal.formats import QTensor, nvfp4, spec_of
from m3hal.ops import ExpertWeights
from m3hal.shape import Site
from m3hal_conformance.case import Case, Inputs, Rng, dtype_of
from m3hal_conformance.inputs import hot_routing
from m3hal_conformance.suite._build import ask

STORED = ("fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4")


def _stored(x: Tensor, format: str) -> QTensor:
    """A weight [.., N, K]; in nvfp4 with a global scale for each entry of its leading axes."""
    if format == "nvfp4":
        return nvfp4.quantize(x, nvfp4.global_scale_of(x, own=x.ndim - 2))
    return formats.quantize(x, spec_of(format))


def _product(width: int, format: str):  # type: ignore[no-untyped-def]
    def make(rng: Rng, site: Site) -> Inputs:
        x, weight = rng.normal(9, width).to(dtype_of(site)), rng.normal(136, width) * width**-0.5
        return {"x": x, "weight": _stored(weight, format)}

    return make


def _experts(format: str):  # type: ignore[no-untyped-def]
    def make(rng: Rng, site: Site) -> Inputs:
        hidden, inner, count = 128, 96, 6
        size = 2.0 ** torch.arange(count)[:, None, None]
        w13 = rng.normal(count, 2 * inner, hidden) * (2 / hidden**0.5)
        w2 = rng.normal(count, hidden, inner) * inner**-0.5 * size
        weights, ids = hot_routing(17, count, 4, rng.generator)
        experts = ExpertWeights(_stored(w13, format), _stored(w2, format))
        return {"x": rng.normal(17, hidden).to(dtype_of(site)), "weights": weights, "ids": ids, "experts": experts}

    return make


def _weights() -> list[Case]:
    cases: list[Case] = []
    for format in STORED:
        stored: dict[str, Any] = {"weight_format": format, "kind": "moe", "quick": format in ("mxfp8", "nvfp4")}
        for width in (32, 96, 384, 416):
            cases += ask("linear", f"{format}_k_{width}", _product(width, format), bugs=("F59",), **stored)
        cases += ask("moe_experts", f"{format}_experts", _experts(format), bugs=("F52", "F57"), **stored)
    return cases


def _activations() -> list[Case]:
    def x(rows: int):  # type: ignore[no-untyped-def]
        return lambda rng, site: {"x": rng.normal(rows, 96) * torch.exp(2 * rng.normal(rows, 1))}

    def q(rng: Rng, site: Site) -> Inputs:
        return {"q": formats.quantize(rng.normal(7, 96), spec_of(site.activation_format))}

    cases: list[Case] = []
    for format in STORED:
        options: dict[str, Any] = {"kind": "dense_mlp", "activation_format": format, "quick": True}
        cases += ask("quantize", f"to_{format}", x(7), dtypes=("float32",), bugs=("F61",), **options)
        cases += ask("quantize", f"to_{format}_no_token", x(0), dtypes=("float32",), bugs=("F30",), **options)
        cases += ask("dequantize", f"from_{format}", q, bugs=("F52",), **options)
    return cases


CASES = [*_weights(), *_activations()]
