"""Where tests usually stop: the largest batch, long contexts, other constants, odd addresses, far numbers, many calls.

Each question here was first asked by a wrong kernel that had passed all others. The cases are thin in every direction
but the one they are about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal import formats
from m3hal.ops import ExpertWeights
from m3hal.ops.rope_partial import rope_table
from m3hal_conformance.case import MAX_TOKENS, Case, Inputs, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, activations, ask, in_wide_row
from m3hal_conformance.suite.experts import _hot, _in_turn, _logits, _moe_inputs, _spread
from m3hal_conformance.suite.insert import _inputs as insert
from m3hal_conformance.suite.ranking import NAN, ONE, VISIBLE, _mostly_nan, _normal, _scores, _sharded

P = 128
Make = Callable[[Rng, Site], Inputs]
LARGEST = (*LIGHT, "unbiased")
LARGEST_ROWS = (*LARGEST, "permuted_rows")
ROWS = ("row_alone", "permuted_rows")
OFTEN: dict[str, Any] = {"checks": ("oracle", "many_calls"), "bugs": ("F34",), "dtypes": ("bfloat16",)}
#: exponents of ten by which rows are scaled; fp16 holds neither end
FAR = (0, 6, -9, 9, -6, 5, -8)


def _far_apart(tensor: Tensor) -> Tensor:
    """Rows (first axis) of sizes from 1e-9 to 1e9."""
    size = 10.0 ** torch.tensor([FAR[row % len(FAR)] for row in range(len(tensor))])
    return (tensor.float() * size.view(-1, *[1] * (tensor.ndim - 1))).to(tensor.dtype)


def _edited(make: Make, **edits: Callable[[Tensor], Tensor]) -> Make:
    """The same inputs, some of them edited."""

    def edited(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site)
        return {name: edits[name](value) if name in edits else value for name, value in inputs.items()}

    return edited


def _drawn(**shapes: Sequence[int]) -> Make:
    """Normal numbers by name; weights a third of the size."""

    def make(rng: Rng, site: Site) -> Inputs:
        size = {name: 0.3 if name == "weight" else 1.0 for name in shapes}
        return {name: (size[name] * rng.normal(*shape)).to(dtype_of(site)) for name, shape in shapes.items()}

    return make


def _rotated(tokens: int, theta: float = 5e6) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        x = rng.normal(tokens, 2, 128).to(dtype_of(site))
        table = rope_table(4096, site.rotary_dim, theta)
        return {"x": x, "positions": rng.integers(0, 4096, tokens), "cos_sin": table}

    return make


def _rows() -> list[Case]:
    """Operators whose rows have nothing to do with each other."""
    norm: dict[str, Any] = {"kind": "sparse_attention"}
    cases: list[Case] = []
    for op, names in (("rms_norm", ("x",)), ("add_rms_norm", ("x", "residual"))):

        def rows(tokens: int, width: int, names: Sequence[str] = names) -> Make:
            return _drawn(**dict.fromkeys(names, (tokens, width)), weight=(width,))

        off = dict.fromkeys(names, in_wide_row)
        cases += [
            *ask(op, "tokens_4096", rows(MAX_TOKENS, 128), checks=LARGEST_ROWS, bugs=("F68",), **norm),
            *ask(op, "odd_address", _edited(rows(9, 128), **off), bugs=("F65",), quick=True, **norm),
            *ask(op, "wide_range", _edited(rows(14, 256), **dict.fromkeys(names, _far_apart)), quick=True, also=ROWS,
                 **norm),
            *ask(op, "other_constants", _edited(rows(5, 256), **dict.fromkeys(names, lambda t: 1e-2 * t)), also=ROWS,
                 eps=1e-3, weight_offset=0.0, bugs=("F71", "F72"), quick=True, **norm),
            *ask(op, "called_often", rows(3, 128), **OFTEN, **norm),
        ]  # fmt: skip
    product = _drawn(x=(MAX_TOKENS, 128), weight=(64, 128))
    gated = _drawn(gate_up=(MAX_TOKENS, 64))
    few = _edited(_drawn(x=(14, 96), weight=(40, 96)), x=_far_apart)
    return [
        *cases,
        *ask("linear", "tokens_4096", product, checks=LARGEST_ROWS, bugs=("F68",), **norm),
        *ask("linear", "wide_range", few, quick=True, also=("unbiased", *ROWS), input_class="far", **norm),
        *ask("linear", "called_often", _drawn(x=(3, 96), weight=(40, 96)), **OFTEN, **norm),
        *ask("rope_partial", "tokens_4096", _rotated(MAX_TOKENS), checks=LARGEST_ROWS, bugs=("F68",), **norm),
        *ask("rope_partial", "other_theta", _rotated(9, 1e4), bugs=("F04",), quick=True, also=("unbiased", *ROWS),
             **norm),
        *ask("rope_partial", "odd_address", _edited(_rotated(9), x=in_wide_row), bugs=("F65",), quick=True, **norm),
        *ask("rope_partial", "called_often", _rotated(3), **OFTEN, **norm),
        *ask("swiglu_oai", "tokens_4096", gated, kind="moe", checks=LARGEST_ROWS, bugs=("F68",)),
        *ask("swiglu_oai", "wide_range", _edited(_drawn(gate_up=(14, 64)), gate_up=_far_apart), kind="moe", quick=True,
             also=("unbiased", *ROWS)),
        *ask("swiglu_oai", "dense_mlp_tp1", _drawn(gate_up=(2, 24_576)), kind="dense_mlp", also=("row_alone",)),
        *ask("swiglu_oai", "called_often", _drawn(gate_up=(3, 64)), kind="moe", **OFTEN),
        *[case for format in ("mxfp8", "mxfp4", "nvfp4") for case in ask(
            "dequantize", f"from_{format}_three_axes",
            lambda r, s: {"q": formats.quantize(r.normal(2, 3, 96), formats.spec_of(s.activation_format))},
            kind="dense_mlp", activation_format=format, bugs=("F61", "F70"))],
        *ask("quantize", "tokens_4096", activations(lambda r: r.normal(MAX_TOKENS, 64)), kind="dense_mlp",
             checks=LIGHT, activation_format="bfloat16", bugs=("F68",)),
    ]  # fmt: skip


def _both_nans(rng: Rng, *shape: int) -> Tensor:
    """NaN of either sign: an integer key puts one of them first."""
    scores = _mostly_nan(rng, *shape)
    negative = torch.full((), NAN).copysign(torch.tensor(-1.0))
    return torch.where(scores.isnan() & (rng.uniform(0, 1, *shape) < 0.5), negative, scores)


def _ranking() -> list[Case]:
    ranked: dict[str, Any] = {"kind": "sparse_attention", "dtypes": ONE, "max_context": 1 << 20}
    often = {**OFTEN, **ranked}
    many = [n % 41 for n in range(MAX_TOKENS)]
    return [
        *ask("topk_blocks", "both_nans", _scores(_both_nans, VISIBLE, 40), also=ROWS, bugs=("F28",), quick=True,
             **ranked),
        *ask("topk_blocks", "tokens_4096", _scores(_normal, many, 40), checks=LIGHT, bugs=("F68",), **ranked),
        *ask("topk_blocks", "called_often", _scores(_normal, [17, 40], 40), **often),
        *ask("merge_topk", "both_nans", _sharded(4, _both_nans, VISIBLE), bugs=("F28",), quick=True, **ranked),
        *ask("merge_topk", "ranks_16", _sharded(16, _normal, [*VISIBLE, 200]), bugs=("F35",), quick=True, **ranked),
        *ask("merge_topk", "ranks_32", _sharded(32, _normal, [600, 3]), bugs=("F35",), **ranked),
        *ask("merge_topk", "tokens_4096", _sharded(2, _normal, many), checks=LIGHT, bugs=("F68",), **ranked),
        *ask("merge_topk", "called_often", _sharded(2, _normal, [17, 40]), **often),
    ]  # fmt: skip


def _every_expert(rng: Rng, tokens: int) -> tuple[Tensor, Tensor]:
    """All 128 experts, four to a token."""
    ids = torch.stack([rng.permutation(128) for _ in range(tokens * 4 // 128)]).view(tokens, 4)
    return rng.uniform(0.25, 1, tokens, 4), ids.int()


def _nan_nowhere(rng: Rng, site: Site) -> Inputs:
    """Padded tokens: NaN, and without any expert."""
    inputs = _moe_inputs(9, _spread)(rng, site)
    inputs["ids"][3], inputs["ids"][8] = -1, -1
    inputs["x"][(inputs["ids"] < 0).all(-1)] = NAN
    return inputs


def _large_tokens(rng: Rng, site: Site) -> Inputs:
    """Tokens too large for fp16, whose experts' first weights make ordinary numbers of them again."""
    inputs = _moe_inputs(9, _hot)(rng, site)
    experts = inputs["experts"]
    weights = replace(experts, w13=(experts.w13.float() * 2.0**-20).to(experts.w13.dtype))
    return {**inputs, "x": inputs["x"] * 2.0**20, "experts": weights}


def _four_times(rng: Rng, tokens: int) -> tuple[Tensor, Tensor]:
    """A token's four choices are one expert."""
    return rng.uniform(0.25, 1, tokens, 4), torch.arange(tokens)[:, None].expand(-1, 4).int().contiguous()


def _cancelling(rng: Rng, site: Site) -> Inputs:
    """The second and the last choice of each token undo each other; what is left is a sixteenth of either."""
    inputs = _moe_inputs(9, _hot)(rng, site)
    w13, w2 = inputs["experts"].w13, inputs["experts"].w2
    w13[5], w2[5], w2[2], w2[6] = w13[3], -w2[3], w2[2] / 16, w2[6] / 16
    ids = torch.tensor([[2, 3, 6, 5], [6, 5, 2, 3]]).repeat(5, 1)[:9].int()
    weights = rng.uniform(0.5, 1, 9, 4)
    weights[:, 3] = weights[:, 1]
    return {**inputs, "weights": weights, "ids": ids}


def _experts() -> list[Case]:
    small: dict[str, Any] = {"kind": "moe", "hidden_size": 64, "intermediate_size": 32}
    own: dict[str, Any] = {"kind": "moe", "hidden_size": 256, "intermediate_size": 96, "num_local_experts": 8}
    many = _moe_inputs(MAX_TOKENS, _all_to_few, 64, 32)
    return [
        *ask("moe_experts", "tokens_4096", many, checks=LARGEST_ROWS, bugs=("F68", "F31"), num_local_experts=8,
             **small),
        *ask("moe_experts", "experts_128", _experts_128, bugs=("F43", "F31"), num_local_experts=128, quick=True,
             also=("permuted_experts", "planned_once"), **small),
        *ask("moe_experts", "nan_nowhere", _nan_nowhere, bugs=("F28", "F29"), quick=True, also=ROWS, **own),
        *ask("moe_experts", "planned_once", _moe_inputs(8, _in_turn), bugs=("F34",), quick=True,
             also=("planned_once", "unbiased", "updated_weights"), **own),
        *ask("moe_experts", "wide_range", _large_tokens, quick=True, also=ROWS, input_class="far", **own),
        *ask("moe_experts", "plain_silu", _moe_inputs(9, _hot), alpha=1.0, beta=0.0, limit=2.0, bugs=("F04", "F06"),
             also=("row_alone",), **own),
        *ask("moe_experts", "four_times_the_same", _moe_inputs(5, _four_times), also=("row_alone",), **own),
        *ask("moe_experts", "cancelling", _cancelling, quick=True, also=ROWS, bugs=("F73",),
             input_class="cancelling", **own),
        *ask("moe_experts", "called_often", _moe_inputs(3, _hot, 64, 32), **OFTEN,
             num_local_experts=8, **small),
        *ask("route_topk", "tokens_4096", _logits(MAX_TOKENS), kind="moe", dtypes=ONE, checks=LIGHT,
             bugs=("F68",)),
        *ask("route_topk", "called_often", _logits(3), kind="moe", **{**OFTEN, "dtypes": ONE}),
        *ask("route_topk", "called_often_65", _logits(65), kind="moe", **{**OFTEN, "dtypes": ONE}),
    ]  # fmt: skip


def _all_to_few(rng: Rng, tokens: int) -> tuple[Tensor, Tensor]:
    """Every token goes to experts 1 and 5."""
    ids = torch.full((tokens, 4), -1, dtype=torch.int32)
    ids[:, 0], ids[:, 3] = 1, 5
    return rng.uniform(0.25, 1, tokens, 4), ids


def _experts_128(rng: Rng, site: Site) -> Inputs:
    weights, ids = _every_expert(rng, 64)
    w13 = (rng.normal(128, 64, 64) / 4).to(dtype_of(site))
    w2 = (rng.normal(128, 64, 32) / 6).to(dtype_of(site))
    x = rng.normal(64, 64).to(dtype_of(site))
    return {"x": x, "weights": weights, "ids": ids, "experts": ExpertWeights(w13, w2)}


def _million(rng: Rng, site: Site) -> Inputs:
    """A table of the model's full context; only the rows that are read are filled."""
    positions = [0, 127, 32_767, 32_768, 65_535, 65_536, 1_048_575]
    inputs = insert([5, 6, 7, 8, 129, 300, -1], positions)(rng, site)
    table = torch.empty(1 << 20, site.rotary_dim)
    where = torch.tensor(positions)
    angle = where[:, None].float() / 5e6 ** (torch.arange(0, site.rotary_dim, 2) / site.rotary_dim)
    table[where] = torch.cat([angle.cos(), angle.sin()], -1)
    return {**inputs, "cos_sin": table}


def _other_constants(rng: Rng, site: Site) -> Inputs:
    inputs = insert([5, 128, -1, 300, 7], [0, 3, 77, 900, 4095])(rng, site)
    table = rope_table(4096, site.rotary_dim, 1e4)
    return {**inputs, "qkv": 1e-2 * inputs["qkv"], "cos_sin": table}


def _inserted() -> list[Case]:
    asked: dict[str, Any] = {"kind": "sparse_attention", "tensor_parallel": 4}
    dense = {**asked, "kind": "dense_attention"}
    far: dict[str, Any] = {"checks": ("oracle", "rerun"), "lazy": ("cos_sin",), "bugs": ("F63",)}
    other: dict[str, Any] = {"eps": 1e-3, "weight_offset": 0.0, "bugs": ("F04", "F71", "F72"), "quick": True}
    return [
        *ask("qk_norm_rope_insert", "tokens_4096", _largest_insert, checks=LARGEST, bugs=("F68",),
             **{**asked, "tensor_parallel": 8}),
        *ask("qk_norm_rope_insert", "context_1m", _million, max_context=1 << 20, **far, **asked),
        *ask("qk_norm_rope_insert", "context_1m_dense", _million, max_context=1 << 20, **far, **dense),
        *ask("qk_norm_rope_insert", "other_constants", _other_constants, **other, **asked),
        *ask("qk_norm_rope_insert", "other_constants_dense", _other_constants, **other, **dense),
        *ask("qk_norm_rope_insert", "called_often", insert([5, 128, -1], [0, 3, 77]), **OFTEN,
             **asked),
    ]  # fmt: skip


def _largest_insert(rng: Rng, site: Site) -> Inputs:
    slots = [(n if n % 50 else -1) for n in (rng.permutation(7 * P)).tolist()]
    positions = rng.integers(0, 4096, MAX_TOKENS).tolist()
    padded = [*slots, *[-1] * (MAX_TOKENS - len(slots))]
    order = rng.permutation(MAX_TOKENS).tolist()
    return insert([padded[i] for i in order], positions)(rng, site)


CASES = [*_rows(), *_ranking(), *_experts(), *_inserted()]
