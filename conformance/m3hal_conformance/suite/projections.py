"""``linear``, ``quantize``, ``dequantize``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from m3hal.formats.plain import QSpec, QTensor
from m3hal_conformance.case import Case, Inputs, Make, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, activations, ask, column_major, every_other, in_wide_row, spikes

H = 6144


def _product(tokens: int, k: int, n: int) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        x = rng.normal(tokens, k)
        return {"x": x.to(dtype_of(site)), "weight": (rng.normal(n, k) * k**-0.5).to(dtype_of(site))}

    return make


def _spiked(rng: Rng, site: Site) -> Inputs:
    """Row t of x lives in chunk t of K, so every step of the sum decides some row."""
    x = spikes(96, H, 64, rng)
    return {"x": x.to(dtype_of(site)), "weight": rng.normal(96, H).to(dtype_of(site))}


def _positive(rng: Rng, site: Site) -> Inputs:
    """A sum that only grows: a narrow accumulator stands still long before its end."""
    return {
        "x": rng.uniform(0.5, 1.5, 16, H).to(dtype_of(site)),
        "weight": rng.uniform(0.5, 1.5, 64, H).to(dtype_of(site)),
    }


def _selecting(rng: Rng, site: Site) -> Inputs:
    """Each output copies one input: row n of the weight picks column (7 n + 3) mod K."""
    weight = torch.zeros(160, 416)
    weight[torch.arange(160), (7 * torch.arange(160) + 3) % 416] = 1
    return {"x": rng.normal(33, 416).to(dtype_of(site)), "weight": weight.to(dtype_of(site))}


def _strided(rng: Rng, site: Site) -> Inputs:
    inputs = _product(9, 384, 96)(rng, site)
    return {"x": in_wide_row(inputs["x"]), "weight": in_wide_row(inputs["weight"])}


def _transposed(rng: Rng, site: Site) -> Inputs:
    inputs = _product(9, 384, 96)(rng, site)
    return {"x": every_other(inputs["x"], 0), "weight": column_major(inputs["weight"])}


def _one_bad_row(rng: Rng, site: Site) -> Inputs:
    inputs = _product(18, 384, 96)(rng, site)
    inputs["x"][5, 3] = float("nan")
    inputs["x"][17] = 0
    return inputs


def _router(tokens: int) -> Make:
    """bf16 tokens and the router's fp32 weight, no two rows of which are alike in their first bits only."""

    def make(rng: Rng, site: Site) -> Inputs:
        weight = rng.normal(16, 1, H) * H**-0.5 * (1 + 2.0**-13 * rng.normal(8, H))
        return {"x": rng.normal(tokens, H).to(dtype_of(site)), "weight": weight.flatten(0, 1)}

    return make


def _linear() -> list[Case]:
    def q(name: str, make: Make, **options: Any) -> list[Case]:
        return ask("linear", name, make, kind=options.pop("kind", "sparse_attention"), **options)

    return [
        *q("qkv_tp4", _product(7, H, 2560), checks=LIGHT),
        *q("o_proj_tp4", _product(65, 2048, H), checks=LIGHT),
        *q("one_token", _product(1, H, 640), bugs=("F32",), quick=True),
        *q("no_token", _product(0, H, 128), bugs=("F30",), quick=True),
        *q("rows_alone", _product(130, 384, 256), checks=("oracle", "row_alone", "permuted_rows"), bugs=("F32",),
           quick=True),
        *[c for k in (32, 96, 384, 416) for c in q(f"k_{k}", _product(17, k, 136), bugs=("F59",), quick=k == 416)],
        *q("every_chunk", _spiked, quick=True, input_class="spiked"),
        *q("growing_sum", _positive, quick=True, input_class="positive"),
        *q("selecting", _selecting, quick=True, input_class="selecting"),
        *q("strided", _strided, bugs=("F65",), quick=True),
        *q("transposed", _transposed, bugs=("F65",)),
        *q("tokens_513", _product(513, 512, 136), checks=LIGHT),
        *q("square", _product(64, 64, 64), quick=True, also=("row_alone",)),
        *q("one_bad_row", _one_bad_row, bugs=("F28",), quick=True, also=("row_alone", "permuted_rows")),
        *[
            c
            for tokens in (1, 9, 65)
            for c in q(f"router_{tokens}", _router(tokens), kind="moe", dtypes=("bfloat16",), input_class="router",
                       quick=tokens == 9, also=("row_alone", "permuted_rows") if tokens > 1 else ())
        ],
    ]  # fmt: skip


def _numbers(rng: Rng) -> torch.Tensor:
    """Ordinary numbers, and those that rounding gets wrong: ties, both zeros, subnormals, overflow, inf, NaN."""
    tie = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20, 0.0, -0.0, 1e-40, -1e-39])
    edge = torch.tensor([3.3895e38, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan"), 1e-38, 65504.0])
    return torch.cat([rng.normal(5, 16), tie.repeat(2)[None], edge.repeat(2)[None]])


def _quantize() -> list[Case]:
    def q(name: str, make: Callable[[Rng], torch.Tensor], **options: Any) -> list[Case]:
        return ask("quantize", name, activations(make), kind="dense_mlp", **options)

    cases = []
    for to in ("float32", "bfloat16"):
        cases += q(f"to_{to}", _numbers, activation_format=to, quick=True, bugs=("F56", "F84"))
        cases += q(f"to_{to}_strided", lambda r: column_major(_numbers(r)), activation_format=to, bugs=("F65",))
        cases += q(f"to_{to}_no_token", lambda r: _numbers(r)[:0], activation_format=to, bugs=("F30",))
        cases += q(f"to_{to}_three_axes", lambda r: r.normal(2, 3, 64), activation_format=to, quick=True)
        cases += q(f"to_{to}_hidden", lambda r: r.normal(7, H), activation_format=to, also=("permuted_rows",))
    return cases


def _dequantize() -> list[Case]:
    def stored(format: str, rows: slice = slice(None), strided: bool = False) -> Make:
        def make(rng: Rng, site: Site) -> Inputs:
            data = _numbers(rng)[rows].to(getattr(torch, format))
            return {"q": QTensor(every_other(data, 0) if strided else data, QSpec(format))}

        return make

    cases = []
    for format in ("float32", "bfloat16"):
        for name, make in (
            ("", stored(format)),
            ("_no_token", stored(format, slice(0, 0))),
            ("_strided", stored(format, strided=True)),
        ):
            cases += ask(
                "dequantize", f"from_{format}{name}", make, kind="dense_mlp", quick=not name, bugs=("F56", "F30")
            )
    return cases


CASES = [*_linear(), *_quantize(), *_dequantize()]
