"""``qk_norm_rope_insert``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from m3hal.ops import QKNorms
from m3hal.ops.rope_partial import rope_table
from m3hal_conformance.case import Case, Inputs, Make, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask, in_wide_row
from m3hal_conformance.suite._paged import empty, index_layout, kv_layout

BOTH = ("hnd", "nhd")
P = 128
#: page boundaries, out of order, padded rows between
SLOTS = [127, 128, -1, 5 * P + 127, 0, 3 * P, -1]
POSITIONS = [127, 128, 0, 4095, 1, 640, 77]


def _row_width(site: Site) -> int:
    main = (site.num_q_heads + 2 * site.num_kv_heads) * site.head_dim
    return main + ((site.num_index_heads + 1) * site.index_dim if site.num_index_heads else 0)


def _inputs(
    slots: list[int], positions: list[int], *, index_slots: list[int] | None = None, outer: int = 1
) -> Callable[..., Inputs]:
    def make(rng: Rng, site: Site, kind: str = "hnd") -> Inputs:
        dtype = dtype_of(site)

        def weight(dim: int) -> torch.Tensor:
            return (0.3 * rng.normal(dim)).to(dtype)

        has_index = site.num_index_heads > 0
        norms = QKNorms(weight(site.head_dim), weight(site.head_dim))
        if has_index:
            norms = QKNorms(norms.q, norms.k, weight(site.index_dim), weight(site.index_dim))
        where = torch.tensor(slots, dtype=torch.int64)
        return {
            "qkv": rng.normal(len(slots), _row_width(site)).to(dtype),
            "norms": norms,
            "positions": torch.tensor(positions, dtype=torch.int64),
            "cos_sin": rope_table(4096, site.rotary_dim, 5e6),
            "kv": empty(kv_layout(site, kind), 7, rng, outer),
            "index_cache": empty(index_layout(site, kind), 7, rng, outer) if has_index else None,
            "slots": where,
            "index_slots": (where if index_slots is None else torch.tensor(index_slots)).clone() if has_index else None,
        }

    return make


def _many(tokens: int) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        slots = rng.permutation(7 * P)[:tokens].tolist()
        return _inputs(slots, rng.integers(0, 4096, tokens).tolist())(rng, site)

    return make


def _scaled_heads(rng: Rng, site: Site) -> Inputs:
    """Heads of sizes from 1e-3 to 1e3: a norm over the whole projection, or a neighbour's, shows at once."""
    inputs = _inputs(SLOTS, POSITIONS)(rng, site)
    heads = inputs["qkv"].shape[1] // site.head_dim
    scale = torch.logspace(-3, 3, heads)[rng.permutation(heads)].repeat_interleave(site.head_dim)
    return {**inputs, "qkv": (inputs["qkv"].float() * scale).to(dtype_of(site))}


def _tail_of_heads(rng: Rng, site: Site) -> Inputs:
    """The energy of each head lies in its last 16 dimensions, which do not rotate but count in its norm."""
    inputs = _inputs(SLOTS, POSITIONS)(rng, site)
    x = inputs["qkv"].unflatten(1, (-1, site.head_dim))
    x[..., :-16] *= 0.05
    return inputs


def _bad_token(rng: Rng, site: Site) -> Inputs:
    """A NaN in one token's q and another's v; infinity in a k: each stays in its own head."""
    inputs = _inputs(SLOTS, POSITIONS)(rng, site)
    qkv, dim = inputs["qkv"], site.head_dim
    qkv[1, 5] = float("nan")
    qkv[3, (site.num_q_heads + site.num_kv_heads) * dim + 7] = float("nan")
    qkv[4, 3] = 1e4
    qkv[5] = 0
    return inputs


def _wide_row(rng: Rng, site: Site) -> Inputs:
    inputs = _inputs(SLOTS, POSITIONS)(rng, site)
    return {**inputs, "qkv": in_wide_row(inputs["qkv"], 64, 128)}


def _both(name: str, make: Any, *, kind: str = "sparse_attention", **options: Any) -> list[Case]:
    cases: list[Case] = []
    for layout in BOTH:
        bound = lambda rng, site, make=make, layout=layout: make(rng, site, layout)  # noqa: E731
        options = {"tensor_parallel": 4, **options}
        cases += ask("qk_norm_rope_insert", name, bound, kind=kind, layouts=(layout,), **options)
    return cases


def _insert() -> list[Case]:
    def q(name: str, make: Any, **options: Any) -> list[Case]:
        options = {"tensor_parallel": 4, "kind": "sparse_attention", **options}
        return ask("qk_norm_rope_insert", name, make, **options)

    other = [1, 2, 3, 4 * P, -1, 9, 6 * P]
    return [
        *_both("page_boundaries", _inputs(SLOTS, POSITIONS), quick=True, bugs=("F68", "F74", "F75")),
        *_both("two_kv_heads", _inputs(SLOTS, POSITIONS), tensor_parallel=2, quick=True, bugs=("F67", "F68")),
        *_both("block_outer", _inputs(SLOTS, POSITIONS, outer=3), bugs=("F64",), quick=True),
        *_both("dense_layer", _inputs(SLOTS, POSITIONS), kind="dense_attention", quick=True),
        *q("all_heads", _inputs(SLOTS, POSITIONS), tensor_parallel=1, checks=LIGHT, bugs=("F67",)),
        *q("tp8", _inputs(SLOTS, POSITIONS), tensor_parallel=8, bugs=("F67",)),
        *q("own_index_slots", _inputs(SLOTS, POSITIONS, index_slots=other), bugs=("F24",), quick=True),
        *q("tokens_64", _many(64), bugs=("F68",), checks=LIGHT, quick=True),
        *q("tokens_513", _many(513), bugs=("F68",), checks=LIGHT),
        *q("tokens_equal_heads", _inputs([5, 6, -1, 200, 7, 300, 9, 11, 12, 13, 14, 15, 16, 17, 18, 19],
           list(range(16)))),
        *q("scaled_heads", _scaled_heads, bugs=("F75",), quick=True),
        *q("tail_of_heads", _tail_of_heads, quick=True, input_class="spiked"),
        *q("bad_token", _bad_token, bugs=("F28",), quick=True),
        *q("fused_row", _wide_row, bugs=("F65",), quick=True),
        *q("all_padded", _inputs([-1, -1, -1], [0, 0, 0]), bugs=("F29",), quick=True),
        *q("one_token", _inputs([129], [129]), bugs=("F32",)),
        *q("no_token", _inputs([], []), bugs=("F30",), quick=True),
    ]  # fmt: skip


CASES = _insert()
