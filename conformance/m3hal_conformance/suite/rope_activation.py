"""``rope_partial`` and ``swiglu_oai``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from m3hal.ops.rope_partial import rope_table
from m3hal_conformance.case import Case, Inputs, Make, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask, every_other, in_wide_row

THETA = 5e6
MAX_POS = 4096
ROWS = ("permuted_rows",)


def _rope_at(positions: list[int], heads: int = 4, dim: int = 128) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        return {
            "x": rng.normal(len(positions), heads, dim).to(dtype_of(site)),
            "positions": torch.tensor(positions, dtype=torch.int64),
            "cos_sin": rope_table(MAX_POS, site.rotary_dim, THETA),
        }

    return make


def _random_positions(tokens: int, heads: int = 4) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        return {**_rope_at([0] * tokens, heads)(rng, site), "positions": rng.integers(0, MAX_POS, tokens)}

    return make


def _million(rng: Rng, site: Site) -> Inputs:
    """A table of the model's full context; only the rows that are read are filled, the rest stays untouched memory."""
    positions = torch.tensor([0, 127, 128, 32767, 32768, 65535, 65536, 524287, 524288, 1048575])
    table = torch.empty(1 << 20, site.rotary_dim)
    angle = positions[:, None].float() / THETA ** (torch.arange(0, site.rotary_dim, 2) / site.rotary_dim)
    table[positions] = torch.cat([angle.cos(), angle.sin()], -1)
    x = rng.normal(len(positions), 2, 128).to(dtype_of(site))
    return {"x": x, "positions": positions, "cos_sin": table}


def _pairs_apart(rng: Rng, site: Site) -> Inputs:
    """Only one dimension of a head is not zero, another in every token: a wrong partner shows as a number elsewhere."""
    inputs = _rope_at([3 + 5 * t for t in range(128)], heads=1)(rng, site)
    return {**inputs, "x": torch.eye(128)[:, None].to(dtype_of(site)) * 2}


def _odd_values(rng: Rng, site: Site) -> Inputs:
    """NaN, infinity and -0 in the part that passes; NaN in one head only."""
    inputs = _rope_at([5, 6, 7], heads=3)(rng, site)
    inputs["x"][0, 0, 100], inputs["x"][1, 1, 127], inputs["x"][2, 2, 64] = float("nan"), float("inf"), -0.0
    inputs["x"][1, 0, 3] = float("nan")
    return inputs


def _fused_row(rng: Rng, site: Site) -> Inputs:
    inputs = _rope_at([9, 1, 127, 128, 0])(rng, site)
    flat = in_wide_row(inputs["x"].flatten(1), 128, 256)
    return {**inputs, "x": flat.unflatten(1, (4, 128))}  # type: ignore[no-untyped-call]


def _rope() -> list[Case]:
    def q(name: str, make: Make, **options: Any) -> list[Case]:
        return ask("rope_partial", name, make, kind="sparse_attention", **options)

    return [
        *q("page_boundary", _rope_at([0, 1, 127, 128, 129, 4095]), quick=True, bugs=("F74",)),
        *q("random_64_heads", _random_positions(65, 64), checks=LIGHT),
        *q("tokens_equal_heads", _random_positions(4, 4), also=ROWS, quick=True),
        *q("tokens_129", _random_positions(129, 4), checks=LIGHT, also=("row_alone", *ROWS)),
        *q("pairs_apart", _pairs_apart, bugs=("F74",), quick=True),
        *q("context_1m", _million, checks=("oracle", "rerun", *ROWS), lazy=("cos_sin",), bugs=("F63",)),
        *q("odd_values", _odd_values, quick=True, also=ROWS),
        *q("fused_row", _fused_row, bugs=("F65",), quick=True),
        *q("every_other_head", lambda r, s: {**_rope_at([4, 5])(r, s), "x": every_other(_rope_at([4, 5])(r, s)["x"],
           1)},
           bugs=("F65",)),
        *q("one_token_one_head", _rope_at([77], heads=1), bugs=("F32",)),
        *q("no_token", _rope_at([]), bugs=("F30",), quick=True),
        *q("full_rotary", _rope_at([0, 5, 900]), rotary_dim=128),
    ]  # fmt: skip


def _gated(tokens: int, width: int) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        return {"gate_up": (3 * rng.normal(tokens, 2 * width)).to(dtype_of(site))}

    return make


def _grid(rng: Rng, site: Site) -> Inputs:
    """Every pair of a gate and an up value around the limits."""
    gate = torch.tensor([6.9, 6.99, 7.0, 7.01, 7.1, 50.0, 0.0, -0.0, 1.0, -1.0, -7.0, -7.1, -20.0, -100.0])
    up = torch.tensor([6.9, 7.0, 7.1, 8.0, 50.0, -6.9, -7.0, -7.1, -8.0, -50.0, 0.0, -1.0, 0.5])
    pairs = torch.cartesian_prod(gate, up)
    return {"gate_up": torch.cat([pairs[:, 0], pairs[:, 1]])[None].to(dtype_of(site))}


def _published(rng: Rng, site: Site) -> Inputs:
    gate_up = torch.tensor([[10.0, -10.0, 3.0, 7.0, 0.5, 10.0, -10.0, -9.0, -7.5, 0.25]])
    return {"gate_up": gate_up.to(dtype_of(site))}


def _published_out(inputs: Inputs) -> Mapping[str, Tensor]:
    """Numbers of the bug report, computed by hand: plain SiLU gives 99.995 in the first place."""
    return {"out": torch.tensor([[55.999625, 2.4348e-6, -17.891572, -41.999719, 0.437986]])}


def _halves(rng: Rng, site: Site) -> Inputs:
    """Gate and up differ in size, so that interleaved reading shows everywhere."""
    gate, up = rng.uniform(1, 2, 5, 96), rng.uniform(-6, -5, 5, 96)
    return {"gate_up": torch.cat([gate, up], -1).to(dtype_of(site))}


def _broken(rng: Rng, site: Site) -> Inputs:
    inputs = _gated(6, 96)(rng, site)
    x = inputs["gate_up"]
    x[1, 5], x[2, 96 + 7], x[3, 0], x[4, 100] = float("nan"), float("nan"), float("inf"), float("-inf")
    return inputs


def _swiglu() -> list[Case]:
    def q(name: str, make: Make, **options: Any) -> list[Case]:
        return ask("swiglu_oai", name, make, kind=options.pop("kind", "moe"), **options)

    return [
        *q("around_the_limits", _grid, bugs=("F03", "F01"), quick=True),
        *q("published_numbers", _published, bugs=("F01", "F02"), golden=_published_out, quick=True),
        *q("expert_tp8", _gated(17, 384), also=ROWS, quick=True),
        *q("expert", _gated(513, 3072), checks=LIGHT),
        *q("dense_mlp_tp8", _gated(7, 1536), kind="dense_mlp"),
        *q("halves", _halves, bugs=("F05",), quick=True),
        *q("broken_values", _broken, bugs=("F28",), quick=True, also=("row_alone", *ROWS)),
        *q("odd_width", _gated(5, 37)),
        *q("strided", lambda r, s: {"gate_up": in_wide_row(_gated(9, 96)(r, s)["gate_up"])}, bugs=("F65",), quick=True),
        *q("every_other_row", lambda r, s: {"gate_up": every_other(_gated(9, 96)(r, s)["gate_up"], 0)}, bugs=("F65",)),
        *q(
            "three_axes",
            lambda r, s: {"gate_up": _gated(6, 96)(r, s)["gate_up"].view(2, 3, 192)},
            quick=True,
            also=ROWS,
        ),
        *q("one_token", _gated(1, 384), bugs=("F32",)),
        *q("no_token", _gated(0, 384), bugs=("F30",), quick=True),
        *q("rows_alone", _gated(130, 96), checks=("oracle", "row_alone")),
        *q("other_constants", _gated(5, 96), alpha=0.5, beta=0.0, limit=3.0, bugs=("F04",), quick=True, also=ROWS),
        *q("alpha_1702_here", _gated(5, 96), alpha=1.702, beta=0.0, limit=1e9, bugs=("F04", "F06")),
    ]


CASES = [*_rope(), *_swiglu()]
