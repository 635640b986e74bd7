"""moe_experts with stored weights and rounded activations, against numpy and ml_dtypes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from m3hal_conformance import assert_rows, worst_row
from m3hal_conformance.inputs import generator, hot_routing

from m3hal import formats
from m3hal.formats import QTensor, nvfp4, spec_of
from m3hal.ops import ExpertWeights
from m3hal.ops.moe_experts import moe_experts

M3 = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
E, H, I = 6, 64, 96  # noqa: E741
STORED = ("bfloat16", "fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4")
Array = np.ndarray


def bank(format: str) -> ExpertWeights:
    """Experts of different size; NVFP4 with a global scale per expert, and for w13 one each of gate and up."""
    rng = generator("moe/formats")
    size = 2.0 ** torch.arange(E)[:, None, None]
    w13 = torch.randn(E, 2 * I, H, generator=rng) * H**-0.5 * 2
    w2 = torch.randn(E, H, I, generator=rng) * I**-0.5 * size
    if format == "nvfp4":
        halves = w13.view(E, 2, I, H)
        global13 = nvfp4.global_scale_of(halves, own=2).expand(E, 2, I, 1).reshape(E, 2 * I, 1)
        return ExpertWeights(nvfp4.quantize(w13, global13), nvfp4.quantize(w2, nvfp4.global_scale_of(w2, own=1)))
    return ExpertWeights(*(formats.quantize(w, spec_of(format)) for w in (w13, w2)))


def numbers(q: QTensor) -> Array:
    """fp64, decoded by ml_dtypes."""
    format = q.spec.format
    if format == "bfloat16":
        return q.data.double().numpy()
    raw = q.data.numpy()
    if format in ("mxfp4", "nvfp4"):
        codes = np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], -1)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    else:
        kind = ml_dtypes.float8_e4m3 if format == "fp8_e4m3_240" else ml_dtypes.float8_e4m3fn
        values = raw.view(kind).astype(np.float64)
    scale = q.scale.numpy()
    if scale.dtype == np.uint8:
        scale = scale.view(ml_dtypes.float8_e4m3fn if format == "nvfp4" else ml_dtypes.float8_e8m0fnu)
    values = values * np.repeat(scale.astype(np.float64), values.shape[-1] // scale.shape[-1], axis=-1)
    return values if q.global_scale is None else values * q.global_scale.double().numpy()


def e4m3(x: Array, largest: int = 448) -> Array:
    kind = ml_dtypes.float8_e4m3 if largest == 240 else ml_dtypes.float8_e4m3fn
    return np.clip(x, -largest, largest).astype(kind).astype(np.float64)


def blocks(x: Array, size: int) -> tuple[Array, Array]:
    grouped = x.reshape(len(x), -1, size)
    return grouped, np.abs(grouped).max(-1, keepdims=True)


def rounded(x: Array, format: str, scale: float | None = None) -> Array:
    """Activations as a kernel takes them, by the rules of the formats in numpy."""
    if format in ("fp8_e4m3", "fp8_e4m3_240"):
        largest = 240 if format == "fp8_e4m3_240" else 448
        step = np.abs(x).max(-1, keepdims=True) / largest if scale is None else np.float64(scale)
        return e4m3(x / step, largest) * step
    if format == "mxfp8":
        grouped, amax = blocks(x, 32)
        step = 2.0 ** np.ceil(np.log2(amax / 448))
        return (e4m3(grouped / step) * step).reshape(x.shape)
    if format == "mxfp4":
        grouped, amax = blocks(x, 32)
        floor = 2.0 ** np.floor(np.log2(amax))
        step = np.where(amax >= 1.75 * floor, 2 * floor, floor) / 4
    else:
        grouped, amax = blocks(x / (scale or 1.0), 16)
        step = e4m3(np.clip(amax / 6, 2**-9, 448))
    codes = np.clip(grouped / step, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return (codes * step).reshape(x.shape) * ((scale or 1.0) if format == "nvfp4" else 1.0)


def by_hand(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    format: str = "given",
    scales: tuple[float | None, float | None] = (None, None),
) -> torch.Tensor:
    """One expert at a time in fp64."""
    w13, w2 = numbers(experts.w13), numbers(experts.w2)
    given = x.double().numpy()
    rows = given if format == "given" else rounded(given, format, scales[0])
    out = np.zeros(given.shape)
    for t, (ws, es) in enumerate(zip(weights.double().tolist(), ids.tolist(), strict=True)):
        for weight, e in zip(ws, es, strict=True):
            gate, up = np.split(w13[e] @ rows[t], 2)
            gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
            hidden = (gate / (1 + np.exp(-1.702 * gate)) * (up + 1.0))[None]
            hidden = hidden if format == "given" else rounded(hidden, format, scales[1])
            out[t] += weight * (w2[e] @ hidden[0])
    return torch.from_numpy(out)


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(count, H, generator=generator("moe/formats/x"))
    return (x, *hot_routing(count, E, 4, generator("moe/formats/routing")))


@pytest.mark.parametrize("format", STORED)
def test_stored_weights_enter_with_their_numbers(run, format):
    """Every format, every expert's and every row's own scales."""
    x, weights, ids = tokens(33)
    experts = bank(format)
    out = run("moe_experts", x, weights, ids, experts, **M3)
    assert_rows(out, by_hand(x, weights, ids, experts), 2e-6)


@pytest.mark.parametrize("format", STORED[1:])
def test_fp64_inputs_are_the_exact_oracle(format):
    """Also the weights' scales are then multiplied in fp64."""
    x, weights, ids = tokens(5)
    out = moe_experts(x.double(), weights.double(), ids, bank(format), **M3)
    assert_rows(out, by_hand(x, weights, ids, bank(format)), 1e-14)


@pytest.mark.parametrize(
    ("format", "least", "most"),
    [
        ("fp8_e4m3", 0.02, 0.06),
        ("fp8_e4m3_240", 0.02, 0.08),
        ("mxfp8", 0.02, 0.06),
        ("mxfp4", 0.1, 0.3),
        ("nvfp4", 0.08, 0.25),
    ],
)
def test_rounded_activations_are_emulated(run, format, least, most):
    """The inputs of both products; the cost is that of the format, a few percent in eight bits, many in four."""
    x, weights, ids = tokens(33)
    experts = bank("bfloat16")
    traits = {"activation_format": format}
    out = moe_experts(x, weights, ids, experts, **M3, traits=traits)
    scales = (None, 56 / 240 if format == "fp8_e4m3_240" else None)
    assert_rows(out, by_hand(x, weights, ids, experts, format, scales), 2e-2)  # a code may flip between fp32 and fp64
    exact = by_hand(x, weights, ids, experts)
    assert least < float((out - exact).norm() / exact.norm()) < most


@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3"])
def test_a_checkpoints_own_scales_are_used(format):
    """``input_scale`` of both products, as dequantisation multipliers."""
    x, weights, ids = tokens(17)
    scales = (0.004, 0.03)
    experts = replace(bank(format), x_scale=torch.tensor(scales[0]), hidden_scale=torch.tensor(scales[1]))
    traits = {"activation_format": format}
    out = moe_experts(x, weights, ids, experts, **M3, traits=traits)
    assert_rows(out, by_hand(x, weights, ids, experts, format, scales), 2e-2)
    dynamic = moe_experts(x, weights, ids, bank(format), **M3, traits=traits)
    assert worst_row(out, dynamic).error > 1e-3


@pytest.mark.parametrize("format", STORED)
def test_experts_can_be_sliced_and_reordered(format):
    """A QTensor's entries are experts with their scales: halves sum to the whole, and renamed ids change nothing."""
    x, weights, ids = tokens(9)
    experts = bank(format)
    whole = moe_experts(x, weights, ids, experts, **M3)
    total = torch.zeros_like(whole)
    for first in (0, E // 2):
        half = slice(first, first + E // 2)
        mine = (ids >= half.start) & (ids < half.stop)
        local = torch.where(mine, ids - first, -1)
        total += moe_experts(x, weights, local, ExpertWeights(experts.w13[half], experts.w2[half]), **M3)
    assert_rows(total, whole.double(), 1e-6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    renamed = ExpertWeights(experts.w13[order], experts.w2[order])
    assert_rows(moe_experts(x, weights, order.argsort()[ids].int(), renamed, **M3), whole.double(), 1e-6)
