"""Stored weights and activations, in every format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from m3hal import formats
from m3hal.formats import QTensor, nvfp4, spec_of
from m3hal.ops import ExpertWeights
from m3hal.shape import Site
from m3hal_conformance.case import Case, Inputs, Make, Rng, dtype_of
from m3hal_conformance.inputs import hot_routing
from m3hal_conformance.suite._build import activations, ask

NAN, INF = float("nan"), float("inf")
STORED = ("fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4")


def _stored(x: Tensor, format: str) -> QTensor:
    """A weight [.., N, K]; in nvfp4 with a global scale for each entry of its leading axes."""
    if format == "nvfp4":
        return nvfp4.quantize(x, nvfp4.global_scale_of(x, own=x.ndim - 2))
    return formats.quantize(x, spec_of(format))


def _product(width: int, format: str) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        x, weight = rng.normal(9, width).to(dtype_of(site)), rng.normal(136, width) * width**-0.5
        return {"x": x, "weight": _stored(weight, format)}

    return make


#: the numbers of codes 0 to 15 of E2M1
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _in_code_order(format: str) -> QTensor:
    """Four rows of 64 numbers: every code in its turn, the even element in the low half of its byte; scales of one."""
    low, high = torch.arange(0, 16, 2), torch.arange(1, 16, 2)
    data = (low | high << 4).to(torch.uint8).repeat(4, 4)
    one = 127 if format == "mxfp4" else 0x38
    scale = torch.full((4, 64 // spec_of(format).group), one, dtype=torch.uint8)
    return QTensor(data, spec_of(format), scale)


def _code_order(rng: Rng, site: Site) -> Inputs:
    return {"q": _in_code_order(site.activation_format)}


def _code_order_numbers(inputs: Inputs) -> Mapping[str, Tensor]:
    """Byte 0x10 is [0, 0.5], byte 0x32 is [1, 1.5] and so on; with the halves exchanged every pair is."""
    return {"out": E2M1.repeat(4, 4)}


def _codes_of_order(rng: Rng) -> Tensor:
    """Numbers that are codes themselves, in the order of the codes, 6 in every group."""
    return E2M1.repeat(4, 4)


def _codes_in_order(inputs: Inputs) -> Mapping[str, Tensor]:
    """mxfp4 keeps -0; its bytes are those of :func:`_in_code_order`."""
    return {"out.data": _in_code_order("mxfp4").data}


def _picked_code(rng: Rng, site: Site) -> Inputs:
    """Row k of x picks column k of a weight whose columns hold the codes in their order."""
    return {"x": torch.eye(64)[:33].to(dtype_of(site)), "weight": _in_code_order(site.weight_format)}


def _picked_codes(inputs: Inputs) -> Mapping[str, Tensor]:
    return {"out": E2M1.repeat(4)[:33, None].expand(-1, 4)}


def _groups(rows: int, width: int, group: int) -> Tensor:
    """Group g has magnitude 2**g: a scale read from another group, or of another group size, is off by a factor."""
    return torch.exp2(torch.arange(width) // group % 12 - 6.0).expand(rows, -1)


def _grouped_product(format: str) -> Make:
    """Every group of 16 columns counts alike: what is large in the weight is small in x."""

    def make(rng: Rng, site: Site) -> Inputs:
        size = _groups(1, 384, 16)
        x, weight = rng.normal(9, 384) / size, rng.normal(136, 384) * size
        return {"x": x.to(dtype_of(site)), "weight": _stored(weight, format)}

    return make


def _experts(format: str, *, scaled: bool = False) -> Make:
    """scaled: with the global scales of a checkpoint, by which quantised activations are divided, and no others."""

    def make(rng: Rng, site: Site) -> Inputs:
        hidden, inner, count = 128, 96, 6
        size = 2.0 ** torch.arange(count)[:, None, None]
        w13 = rng.normal(count, 2 * inner, hidden) * (2 / hidden**0.5)
        w2 = rng.normal(count, hidden, inner) * inner**-0.5 * size
        weights, ids = hot_routing(17, count, 4, rng.generator)
        scales = (torch.tensor(0.013), torch.tensor(0.11)) if scaled else ()
        experts = ExpertWeights(_stored(w13, format), _stored(w2, format), *scales)
        return {"x": rng.normal(17, hidden).to(dtype_of(site)), "weights": weights, "ids": ids, "experts": experts}

    return make


def _weights() -> list[Case]:
    cases: list[Case] = []
    for format in STORED:
        stored: dict[str, Any] = {"weight_format": format, "kind": "moe", "quick": format in ("mxfp8", "nvfp4")}
        for width in (32, 96, 384, 416):
            cases += ask("linear", f"{format}_k_{width}", _product(width, format), bugs=("F59",), **stored)
        cases += ask(
            "linear", f"{format}_groups", _grouped_product(format), bugs=("F70",), input_class="grouped", **stored
        )
        sized = {**stored, "hidden_size": 128, "intermediate_size": 96, "num_local_experts": 6}
        cases += ask("moe_experts", f"{format}_experts", _experts(format), bugs=("F52", "F57"), **sized)
        if format in ("fp8_e4m3", "nvfp4"):
            scaled = _experts(format, scaled=True)
            cases += ask("moe_experts", f"{format}_scaled", scaled, bugs=("F57",), **sized)
        if format in ("mxfp4", "nvfp4"):
            stored["quick"] = True
            cases += ask("linear", f"{format}_nibbles", _picked_code, golden=_picked_codes, bugs=("F55",), **stored)
    return cases


def _broken_rows(rng: Rng) -> Tensor:
    """Rows of ordinary numbers; in some an element is NaN, an infinity, or both; one is all NaN, one has both zeros."""
    x = rng.normal(9, 96) * torch.exp(2 * rng.normal(9, 1))
    x[1, 5], x[2, 40], x[4, 95], x[5] = NAN, INF, -INF, NAN
    x[7, 3], x[7, 90] = INF, NAN
    x[8, 30:34] = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    return x


def _activations() -> list[Case]:
    def x(rows: int) -> Callable[[Rng], Tensor]:
        return lambda rng: rng.normal(rows, 96) * torch.exp(2 * rng.normal(rows, 1))

    def q(rng: Rng, site: Site) -> Inputs:
        return {"q": formats.quantize(rng.normal(7, 96), spec_of(site.activation_format))}

    cases: list[Case] = []
    for format in STORED:
        options: dict[str, Any] = {"kind": "dense_mlp", "activation_format": format, "quick": True}
        broken: dict[str, Any] = {**options, "bugs": ("F28",), "also": ("row_alone", "permuted_rows")}
        cases += ask("quantize", f"to_{format}", activations(x(7)), bugs=("F61",), **options)
        cases += ask("quantize", f"to_{format}_no_token", activations(x(0)), bugs=("F30",), **options)
        cases += ask("quantize", f"to_{format}_broken_rows", activations(_broken_rows), **broken)
        cases += ask("dequantize", f"from_{format}", q, bugs=("F52",), **options)
        if not format.startswith("fp8"):
            cases += _grouped_activations(format, options)
        if format in ("mxfp4", "nvfp4"):
            golden = _codes_in_order if format == "mxfp4" else None
            nibbles: dict[str, Any] = {**options, "bugs": ("F55",)}
            cases += ask("dequantize", f"from_{format}_nibbles", _code_order, golden=_code_order_numbers, **nibbles)
            cases += ask("quantize", f"to_{format}_nibbles", activations(_codes_of_order), golden=golden, **nibbles)
    return cases


def _grouped_activations(format: str, options: dict[str, Any]) -> list[Case]:
    def of(group: int) -> Callable[[Rng], Tensor]:
        return lambda rng: rng.normal(5, 384).sign() * _groups(5, 384, group)

    return [
        case
        for group in (16, 32, 64, 128)
        for case in ask("quantize", f"to_{format}_groups_{group}", activations(of(group)), bugs=("F70",), **options)
    ]


CASES = [*_weights(), *_activations()]
