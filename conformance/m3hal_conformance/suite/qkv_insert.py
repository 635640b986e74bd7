"""``qkv_norm_rope_insert``: the questions of ``qk_norm_rope_insert``, with the product that makes its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m3hal.shape import Site
from m3hal_conformance.case import Case, Inputs, Make, MakeIn, Rng, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask, column_major, every_other, in_wide_row, spikes
from m3hal_conformance.suite._paged import empty, index_layout
from m3hal_conformance.suite.insert import BOTH, POSITIONS, SLOTS, P
from m3hal_conformance.suite.insert import _inputs as insert
from m3hal_conformance.suite.quantised import STORED, _stored
from m3hal_conformance.suite.stored_caches import PAIRS, _formats_of, _in_map

OP = "qkv_norm_rope_insert"
HIDDEN = 192
OTHER = [1, 2, 3, 4 * P, -1, 9, 6 * P]
#: x and the weight from their random numbers: ``edit(rng, site, x, weight)``, fp32
Edit = Callable[[Rng, Site, Tensor, Tensor], tuple[Tensor, Tensor]]


def _as_they_are(rng: Rng, site: Site, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x, weight


def _inputs(slots: list[int], positions: list[int], edit: Edit = _as_they_are, **options: Any) -> MakeIn:
    def make(rng: Rng, site: Site, kind: str = "hnd") -> Inputs:
        inputs = insert(slots, positions, **options)(rng, site, kind)
        row, width = inputs.pop("qkv").shape[1], site.hidden_size
        x, weight = edit(rng, site, rng.normal(len(slots), width), rng.normal(row, width) * width**-0.5)
        return {"x": x.to(dtype_of(site)), "weight": weight.to(dtype_of(site)), **inputs}

    return make


def _spiked(rng: Rng, site: Site, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Token t has its energy in columns 16 t to 16 t + 15: columns that a product leaves out are a token lost."""
    return spikes(x.shape[0], x.shape[1], 16, rng), weight


def _large_middle(rng: Rng, site: Site, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Large products at both ends of K cancel: what an accumulator rounds away in between is the result."""
    x[:, :8], x[:, -8:] = 16.0, 16.0
    weight[:, :8] = weight[:, :8].sign() * 0.5
    weight[:, -8:] = -weight[:, :8]
    return x, weight


def _scaled_heads(rng: Rng, site: Site, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Heads of sizes from 1e-3 to 1e3: a norm over the whole row, or a neighbour's, shows at once."""
    heads = len(weight) // site.head_dim
    size = torch.logspace(-3, 3, heads)[rng.permutation(heads)].repeat_interleave(site.head_dim)
    return x, weight * size[:, None]


def _tail_of_heads(rng: Rng, site: Site, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The energy of each head lies in its last 16 dimensions, which do not rotate but count in its norm."""
    weight.unflatten(0, (-1, site.head_dim))[:, :-16] *= 0.05  # type: ignore[no-untyped-call]
    return x, weight


def _bad_token(rng: Rng, site: Site, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A NaN makes its own token NaN; large numbers and zeros are numbers like others."""
    x[1, 5] = float("nan")
    x[4, 3] = 1e4
    x[5] = 0
    return x, weight


def _groups(rng: Rng, site: Site, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Every 16 neighbours of a row have a size of their own, which no norm over a head takes away."""
    size = torch.exp2(rng.uniform(-3, 3, len(weight) // 16)).repeat_interleave(16)
    return x, weight * size[:, None]


def _many(count: int, edit: Edit = _as_they_are) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        slots = rng.permutation(7 * P)[:count].tolist()
        return _inputs(slots, rng.integers(0, 4096, count).tolist(), edit)(rng, site, "hnd")

    return make


def _strided(rng: Rng, site: Site) -> Inputs:
    """Hidden states and weights as parts of wider ones; positions, slots and angles of every second row."""
    inputs = _inputs(SLOTS, POSITIONS)(rng, site, "hnd")
    apart = {name: every_other(inputs[name], 0) for name in ("positions", "slots", "index_slots", "cos_sin")}
    return {**inputs, "x": in_wide_row(inputs["x"], 64, 8), "weight": column_major(inputs["weight"]), **apart}


def _wide_input(rng: Rng, site: Site) -> Inputs:
    """Hidden states at an odd place of wider rows."""
    inputs = _inputs(SLOTS, POSITIONS)(rng, site, "hnd")
    return {**inputs, "x": in_wide_row(inputs["x"])}


def _apart(rng: Rng, site: Site) -> Inputs:
    """An index cache of more pages than the main one; slots below -1, never the same tokens' in both."""
    slots, others = [127, -2, -9, 3 * P, -P, 5], [10 * P + 3, 4, -3, -P - 1, 9, 8 * P]
    inputs = _inputs(slots, POSITIONS[:6], index_slots=others)(rng, site, "hnd")
    return {**inputs, "index_cache": empty(index_layout(site, "hnd"), 11, rng)}


def _with_stored(format: str, make: MakeIn) -> Make:
    def stored(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site, "hnd")
        return {**inputs, "weight": _stored(inputs["weight"].float(), format)}

    return stored


def _both(name: str, make: MakeIn, **options: Any) -> list[Case]:
    asked = {"kind": "sparse_attention", "tensor_parallel": 8, "hidden_size": HIDDEN, **options}
    return [case for layout in BOTH for case in _in_map(OP, name, make, layout, **asked)]


def _plain() -> list[Case]:
    def q(name: str, make: Any, **options: Any) -> list[Case]:
        asked = {"kind": "sparse_attention", "tensor_parallel": 8, "hidden_size": HIDDEN, **options}
        return ask(OP, name, make, **asked)

    usual = _inputs(SLOTS, POSITIONS)
    constants: dict[str, Any] = {"eps": 0.3, "weight_offset": 0.0, "rotary_dim": 32}
    return [
        *_both("page_boundaries", usual, quick=True, bugs=("F68", "F74", "F75")),
        *_both("two_kv_heads", usual, tensor_parallel=2, quick=True, bugs=("F67", "F68"), checks=LIGHT),
        *_both("block_outer", _inputs(SLOTS, POSITIONS, outer=3), bugs=("F64",)),
        *_both("dense_layer", usual, kind="dense_attention", quick=True),
        *q("own_index_slots", _inputs(SLOTS, POSITIONS, index_slots=OTHER), bugs=("F24",), quick=True),
        *q("slots_apart", _apart, bugs=("F29",), checks=LIGHT, quick=True),
        *q("other_constants", usual, checks=LIGHT, bugs=("F71",), **constants),
        *q("dense_other_constants", usual, kind="dense_attention", checks=LIGHT, bugs=("F71",), **constants),
        *q("slots_below_minus_one", _inputs([127, -2, -9, 3 * P, -P, 5], POSITIONS[:6]), kind="dense_attention",
           bugs=("F29",), checks=LIGHT),
        *q("spiked", _many(12, _spiked), quick=True, input_class="spiked"),
        *q("cancels", _inputs(SLOTS, POSITIONS, _large_middle), quick=True, input_class="cancels"),
        *q("scaled_heads", _inputs(SLOTS, POSITIONS, _scaled_heads), bugs=("F75",), quick=True),
        *q("tail_of_heads", _inputs(SLOTS, POSITIONS, _tail_of_heads), quick=True),
        *q("bad_token", _inputs(SLOTS, POSITIONS, _bad_token), bugs=("F28",), quick=True),
        *q("strided", _strided, bugs=("F65",), quick=True),
        *q("odd_hidden", usual, hidden_size=200, quick=True),
        *q("hidden_72", usual, hidden_size=72, checks=LIGHT),
        *q("wide_input", _wide_input, bugs=("F65",), checks=LIGHT),
        *q("tokens_equal_heads", _many(16)),
        *q("tokens_65", _many(65), bugs=("F68",), checks=LIGHT, quick=True),
        *q("all_padded", _inputs([-1, -1, -1], [0, 0, 0]), bugs=("F29",), quick=True),
        *q("one_token", _inputs([129], [129]), bugs=("F32",)),
        *q("no_token", _inputs([], []), bugs=("F30",), quick=True),
        *q("whole_hidden", _inputs([5, -1], [9, 0]), hidden_size=6144, checks=("oracle",), input_class="long"),
    ]  # fmt: skip


def _stored_caches() -> list[Case]:
    """Every pair of cache formats and page maps; the numbers that are stored come from the product."""
    questions: tuple[tuple[str, MakeIn, Mapping[str, Any]], ...] = (
        ("page_boundaries", _inputs(SLOTS, POSITIONS), {"quick": True, "bugs": ("F60", "F68")}),
        ("groups", _inputs(SLOTS, POSITIONS, _groups), {"bugs": ("F60", "F70"), "quick": True}),
        ("dense_layer", _inputs(SLOTS, POSITIONS), {"kind": "dense_attention"}),
        ("own_index_slots", _inputs(SLOTS, POSITIONS, index_slots=OTHER), {"bugs": ("F24",)}),
    )
    cases: list[Case] = []
    for main, index, kind in PAIRS:
        label, formats = _formats_of(main, index)
        for name, make, options in questions if main == index else questions[:1]:
            asked = {"tensor_parallel": 8, "hidden_size": HIDDEN, "checks": LIGHT, **formats, **options}
            cases += _in_map(OP, f"{label}_{name}", make, kind, **asked)
    return cases


def _stored_weights() -> list[Case]:
    asked = partial(ask, OP, kind="sparse_attention", tensor_parallel=8, hidden_size=HIDDEN, checks=LIGHT)
    usual = _inputs(SLOTS, POSITIONS)
    return [case for f in STORED for case in asked(f"{f}_weight", _with_stored(f, usual), weight_format=f, quick=True)]


CASES = [*_plain(), *_stored_caches(), *_stored_weights()]
