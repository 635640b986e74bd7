"""``rms_norm`` and ``add_rms_norm``."""

from __future__ import annotations

from typing import Any

import torch

from m3hal_conformance.case import Case, Inputs, Make, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask, every_other, in_wide_row, spikes

H, D = 6144, 128
ROWS = ("row_alone", "permuted_rows")


def _x(rng: Rng, site: Site, tokens: int, width: int = H) -> Inputs:
    return {"x": rng.normal(tokens, width).to(dtype_of(site)), "weight": (0.3 * rng.normal(width)).to(dtype_of(site))}


def _spiked(rng: Rng, site: Site) -> Inputs:
    """97 rows: each 64-column chunk of the hidden size carries the energy of one row."""
    return {**_x(rng, site, 0), "x": spikes(97, H, 64, rng).to(dtype_of(site))}


def _last_columns(rng: Rng, site: Site) -> Inputs:
    """Energy in the very last and the very first columns, one, two and four wide."""
    x = 0.02 * rng.normal(8, H)
    for row, columns in enumerate((slice(-1, None), slice(-2, None), slice(-4, None), slice(0, 1), slice(0, 2))):
        x[row, columns] += 8
    return {**_x(rng, site, 0), "x": x.to(dtype_of(site))}


def _odd_rows(rng: Rng, site: Site) -> Inputs:
    """Zero, huge, tiny, NaN and infinite rows between ordinary ones."""
    inputs = _x(rng, site, 12)
    x = inputs["x"]
    x[1], x[3], x[5] = 0, x[3] * 1e4, x[5] * 1e-6
    x[7, 100] = float("nan")
    x[9, -1] = float("inf")
    return inputs


def _heads(rng: Rng, site: Site) -> Inputs:
    return {"x": rng.normal(7, 4, D).to(dtype_of(site)), "weight": (0.3 * rng.normal(D)).to(dtype_of(site))}


def _strided(rng: Rng, site: Site) -> Inputs:
    """q's heads inside the fused projection row: strided tokens, dense heads."""
    inputs = _heads(rng, site)
    row = torch.full((7, 4 * D + 384), float("nan"), dtype=dtype_of(site))
    row[:, 128 : 128 + 4 * D] = inputs["x"].flatten(1)
    return {**inputs, "x": row[:, 128 : 128 + 4 * D].view(7, 4, D)}


def _scattered(rng: Rng, site: Site) -> Inputs:
    inputs = _heads(rng, site)
    return {"x": every_other(inputs["x"], 1), "weight": in_wide_row(inputs["weight"])}


def _weight_of(value: float, tokens: int = 5) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        inputs = _x(rng, site, tokens)
        return {**inputs, "weight": torch.full_like(inputs["weight"], value)}

    return make


def _rms_norm() -> list[Case]:
    op = "rms_norm"

    def q(name: str, make: Make, **options: Any) -> list[Case]:
        return ask(op, name, make, kind=options.pop("kind", "sparse_attention"), **options)

    return [
        *q(
            "tokens_7", lambda r, s: _x(r, s, 7), quick=True, also=("permuted_rows",), bugs=("F73", "F34", "F84", "F85")
        ),
        *q("tokens_513", lambda r, s: _x(r, s, 513), checks=LIGHT),
        *q("one_token", lambda r, s: _x(r, s, 1), quick=True, bugs=("F32",)),
        *q("no_token", lambda r, s: _x(r, s, 0), bugs=("F30",), quick=True),
        *q("rows_alone", lambda r, s: _x(r, s, 130), checks=("oracle", "row_alone"), bugs=("F32",)),
        *q("every_chunk", _spiked, quick=True, input_class="spiked"),
        *q("last_columns", _last_columns, quick=True, input_class="spiked"),
        *q("odd_rows", _odd_rows, bugs=("F73",), quick=True, also=ROWS),
        *q("heads", _heads, bugs=("F75",), quick=True),
        *q("heads_in_fused_row", _strided, bugs=("F65",), quick=True),
        *q("every_other_head", _scattered, bugs=("F65",)),
        *q("weight_minus_one", _weight_of(-1.0), bugs=("F71",)),
        *q("weight_zero", _weight_of(0.0), bugs=("F71",), quick=True),
        *q("plain_weight", lambda r, s: _x(r, s, 5), kind="drafter", bugs=("F71", "F72")),
        *q("large_eps", lambda r, s: {**_x(r, s, 5), "x": 1e-2 * _x(r, s, 5)["x"]}, eps=1e-3),
    ]


def _pair(rng: Rng, site: Site, tokens: int, width: int = H) -> Inputs:
    x = _x(rng, site, tokens, width)
    return {"x": x["x"], "residual": (4 * rng.normal(tokens, width)).to(dtype_of(site)), "weight": x["weight"]}


def _pair_of(make: Make) -> Make:
    """The sum has the structure: x carries it and the residual is small, in turn the other way round."""

    def pair(rng: Rng, site: Site) -> Inputs:
        x, weight = make(rng, site).values()
        small = (0.02 * rng.normal(*x.shape)).to(x.dtype)
        odd = (torch.arange(len(x)) % 2 == 1).view(-1, *[1] * (x.ndim - 1))
        return {"x": torch.where(odd, small, x), "residual": torch.where(odd, x, small), "weight": weight}

    return pair


def _cancelling(rng: Rng, site: Site) -> Inputs:
    """x nearly undoes the residual: what is left is the part that rounding the sum, or x alone, would lose."""
    inputs = _pair(rng, site, 9)
    inputs["x"] = (-inputs["residual"].float() * (1 + 0.05 * rng.normal(9, H))).to(dtype_of(site))
    inputs["x"][4] = -inputs["residual"][4]
    return inputs


def _wide_pair(rng: Rng, site: Site) -> Inputs:
    inputs = _pair(rng, site, 6)
    return {**inputs, "x": in_wide_row(inputs["x"]), "residual": every_other(inputs["residual"], 0)}


def _add_rms_norm() -> list[Case]:
    op = "add_rms_norm"

    def q(name: str, make: Make, **options: Any) -> list[Case]:
        return ask(op, name, make, kind="sparse_attention", **options)

    return [
        *q("tokens_7", lambda r, s: _pair(r, s, 7), quick=True, also=("permuted_rows",), bugs=("F73",)),
        *q("tokens_513", lambda r, s: _pair(r, s, 513), checks=LIGHT),
        *q("one_token", lambda r, s: _pair(r, s, 1), quick=True, bugs=("F32",)),
        *q("no_token", lambda r, s: _pair(r, s, 0), bugs=("F30",), quick=True),
        *q("rows_alone", lambda r, s: _pair(r, s, 130), checks=("oracle", "row_alone"), bugs=("F32",)),
        *q("every_chunk", _pair_of(_spiked), quick=True, input_class="spiked"),
        *q("last_columns", _pair_of(_last_columns), quick=True, input_class="spiked"),
        *q("odd_rows", _pair_of(_odd_rows), quick=True, also=ROWS, bugs=("F73",)),
        *q("cancelling", _cancelling, quick=True, input_class="cancelling"),
        *q("strided", _wide_pair, bugs=("F65",)),
        *q("three_axes", lambda r, s: {n: t.view(2, 3, H) if t.ndim == 2 else t for n, t in _pair(r, s, 6).items()},
           quick=True),
        *q("weight_minus_one", lambda r, s: {**_pair(r, s, 5), "weight": torch.full((H,), -1.0, dtype=dtype_of(s))},
           bugs=("F71",)),
        *q("weight_zero", lambda r, s: {**_pair(r, s, 5), "weight": torch.zeros(H, dtype=dtype_of(s))},
           bugs=("F71",), quick=True),
    ]  # fmt: skip


CASES = [*_rms_norm(), *_add_rms_norm()]
