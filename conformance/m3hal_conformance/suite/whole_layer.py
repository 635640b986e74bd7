"""``sparse_decoder_layer``: one sparse layer with everything in it, small, that chooses four blocks of longer contexts.

No selection is close: a context's index keys are large in the blocks that are to be chosen and small in the others, and
each token's residual points at the experts that it is to choose. A block's values have a size of their own, so that one
block more or less turns the result; routed and shared experts add about as much as the attention does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m3hal.ops import ExpertWeights, QKNorms
from m3hal.ops.rope_partial import rope_table
from m3hal.ops.sparse_decoder_layer import LayerWeights
from m3hal.shape import Site
from m3hal_conformance.case import Case, Inputs, Rng, dtype_of
from m3hal_conformance.inputs import Batch
from m3hal_conformance.ranks import PerRank
from m3hal_conformance.suite._build import LIGHT, ask, in_wide_row
from m3hal_conformance.suite._paged import Lengths, filled, index_layout, kv_layout, requests
from m3hal_conformance.suite.quantised import STORED, _stored
from m3hal_conformance.suite.stored_caches import PAIRS, _formats_of, _in_map

OP = "sparse_decoder_layer"
HIDDEN, INNER, SHARED, EXPERTS = 128, 64, 96, 8
SMALL: dict[str, Any] = {
    "tensor_parallel": 8, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts": EXPERTS,
    "num_local_experts": EXPERTS, "top_k_experts": 2, "top_k_blocks": 4, "shared_intermediate_size": SHARED,
    "shared_format": lambda dtype: dtype,
}  # fmt: skip
DECODE: Lengths = [(1, 700), (1, 129), (1, 0), (1, 1100), (1, 1), (1, 641)]
CHUNKS: Lengths = [(3, 700), (1, 900), (5, 5), (2, 0), (4, 770)]


def _codes(rng: Rng, count: int, width: int) -> Tensor:
    """fp32 [count, width] of +1 and -1, orthogonal to one another where the width is a multiple of twice the count."""
    both = torch.arange(count)[:, None] & torch.arange(width)
    odd = sum((both >> bit & 1 for bit in range(count.bit_length())), torch.zeros_like(both)) % 2
    return (1.0 - 2 * odd) * rng.normal(width).sign()


def _layer(rng: Rng, site: Site) -> LayerWeights:
    dtype, dim, hidden = dtype_of(site), site.head_dim, site.hidden_size
    row = (site.num_q_heads + 2 * site.num_kv_heads + site.num_index_heads + 1) * dim

    def draw(*shape: int, scale: float) -> Tensor:
        return (scale * rng.normal(*shape)).to(dtype)

    def norm(width: int) -> Tensor:
        return (1.0 - site.weight_offset + 0.2 * rng.normal(width)).to(dtype)

    def bank(count: int, inner: int) -> ExpertWeights:
        w13 = draw(count, 2 * inner, hidden, scale=1.5 * hidden**-0.5)
        return ExpertWeights(w13, draw(count, hidden, inner, scale=inner**-0.5))

    shared = bank(1, site.shared_intermediate_size) if site.shared_intermediate_size else None
    return LayerWeights(
        input_norm=norm(hidden),
        qkv=draw(row, hidden, scale=hidden**-0.5),
        norms=QKNorms(*(norm(dim) for _ in range(4))),
        o=draw(hidden, site.num_q_heads * dim, scale=2 * (site.num_q_heads * dim) ** -0.5),
        post_norm=norm(hidden),
        gate=4 / hidden * _codes(rng, site.num_experts, hidden),
        bias=0.03 * rng.normal(site.num_experts),
        experts=replace(bank(site.num_local_experts, site.intermediate_size), shared=shared),
    )


def _context(rng: Rng, site: Site, queries: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and index keys [S, heads, D] of a request; blocks to be chosen lie before those that are forced."""
    blocks = -(-length // site.block_size)
    block = torch.arange(length) // site.block_size
    first, last = site.init_blocks, (length - queries) // site.block_size + 1 - site.local_blocks
    free = first + rng.permutation(max(last - first, 0))
    size = torch.full((blocks,), 0.02)
    size[free[: site.top_k_blocks - site.local_blocks - site.init_blocks]] = 4.0  # new keys are of size one
    keys = 0.3 * rng.normal(length, site.num_kv_heads, site.head_dim)
    values = rng.normal(blocks, site.num_kv_heads, site.head_dim)[block]
    values = 2 * values + 0.1 * rng.normal(length, site.num_kv_heads, site.head_dim)
    return keys, values, size[block][:, None, None] * rng.normal(length, 1, site.index_dim)


def _caches(rng: Rng, site: Site, kind: str, held: Batch) -> dict[str, Any]:
    contexts = [_context(rng, site, queries, length) for queries, length in held.lengths]
    keys, values, index = ([part[n] for part in contexts] for n in range(3))
    return {
        "kv": filled(held, kv_layout(site, kind), keys, values, rng),
        "index_cache": filled(held, index_layout(site, kind), index, None, rng),
    }


def _pointing(rng: Rng, site: Site, tokens: int, gate: Tensor) -> Tensor:
    """Residuals [T, H] of noise, and of the gates of two experts, one more than the other."""
    chosen = torch.stack([rng.permutation(len(gate))[:2] for _ in range(tokens)] or [torch.empty(0, 2).long()])
    first, second = (gate * site.hidden_size / 4)[chosen.view(-1, 2)].unbind(1)
    return rng.normal(tokens, site.hidden_size) + 6 * first + 4 * second


def _of(rng: Rng, site: Site, kind: str, held: Batch) -> Inputs:
    dtype, slots, layer = dtype_of(site), held.query_slots(), _layer(rng, site)
    return {
        "x": rng.normal(held.tokens, site.hidden_size).to(dtype),
        "residual": _pointing(rng, site, held.tokens, layer.gate).to(dtype),
        "layer": layer,
        "positions": held.meta.positions(held.tokens).clamp(min=0),
        "cos_sin": rope_table(4096, site.rotary_dim, 5e6),
        **_caches(rng, site, kind, held),
        "slots": slots,
        "index_slots": slots.clone(),
        "meta": held.meta,
    }


def _inputs(lengths: Lengths, *, max_k: int = 0) -> Callable[..., Inputs]:
    def make(rng: Rng, site: Site, kind: str = "hnd") -> Inputs:
        return _of(rng, site, kind, requests(rng, lengths, site.page_size, max_k=max_k))

    return make


def _strided(rng: Rng, site: Site) -> Inputs:
    inputs = _inputs(CHUNKS[:3])(rng, site, "hnd")
    return {**inputs, "x": in_wide_row(inputs["x"], 8, 24), "residual": in_wide_row(inputs["residual"], 16, 8)}


def _bad_token(rng: Rng, site: Site) -> Inputs:
    """A token that is NaN has a request to itself, and stays there."""
    inputs = _inputs(DECODE)(rng, site, "hnd")
    inputs["x"][1, 5] = float("nan")
    return inputs


def _biased(lengths: Lengths) -> Callable[..., Inputs]:
    """The router's bias decides: all tokens go to two experts, with the weights of the sigmoid."""

    def make(rng: Rng, site: Site, kind: str = "hnd") -> Inputs:
        inputs = _inputs(lengths)(rng, site, kind)
        bias = inputs["layer"].bias.clone()
        bias[rng.permutation(len(bias))[:2]] = torch.tensor([2.5, 1.25])
        return {**inputs, "layer": replace(inputs["layer"], bias=bias)}

    return make


def _with_experts(format: str) -> Callable[[Rng, Site], Inputs]:
    """Routed experts in a storage format; projections and the shared expert are as they were."""

    def stored(rng: Rng, site: Site) -> Inputs:
        inputs = _inputs([(1, 700), (3, 200)])(rng, site, "hnd")
        bank = inputs["layer"].experts
        own = ExpertWeights(_stored(bank.w13.float(), format), _stored(bank.w2.float(), format), shared=bank.shared)
        return {**inputs, "layer": replace(inputs["layer"], experts=own)}

    return stored


def _among(ranks: int, lengths: Lengths) -> Callable[[Rng, Site], Inputs]:
    """Each rank has heads, experts and caches of its own, and a share of what the block before adds.

    With fewer local experts than experts, ranks have some of them each; else a slice of each.
    """

    def make(rng: Rng, site: Site) -> Inputs:
        held = requests(rng, lengths, site.page_size)
        own = [_of(rng, site, "hnd", held) for _ in range(ranks)]
        first = own[0]
        common = {name: getattr(first["layer"], name) for name in ("input_norm", "post_norm", "gate", "bias", "norms")}
        layers = [replace(inputs["layer"], **common) for inputs in own]
        apart = {name: PerRank([inputs[name] for inputs in own]) for name in ("x", "kv", "index_cache")}
        return {**first, **apart, "layer": PerRank(layers), "group": PerRank([None] * ranks)}

    return make


def _other(rng: Rng, site: Site) -> Inputs:
    return _inputs([(1, 1300), (3, 700), (1, 0), (1, 200)])(rng, site, "hnd")


def _plain() -> list[Case]:
    q: Callable[..., list[Case]] = partial(ask, OP, kind="sparse_layer")
    constants = {
        "top_k_blocks": 5, "init_blocks": 1, "local_blocks": 2, "eps": 1e-3, "scale": 0.11, "alpha": 1.3, "beta": 0.5,
        "limit": 1.5, "routed_scale": 0.75, "renormalize": False, "weight_offset": 0.0, "rotary_dim": 32,
    }  # fmt: skip
    narrow, two = {"dtypes": ("bfloat16",)}, {**SMALL, "tensor_parallel": 2}
    alone = {**SMALL, "shared_intermediate_size": 0, "shared_format": ""}
    some, quarter = ({**SMALL, "num_local_experts": EXPERTS // n} for n in (2, 4))
    return [
        *q("decode", _inputs(DECODE), quick=True, bugs=("F19", "F29"), **SMALL),
        *q("chunks", _inputs(CHUNKS), checks=LIGHT, bugs=("F22", "F68"), **SMALL),
        *q("published_choice", _inputs([(2, 2600)]), checks=LIGHT, **{**SMALL, "top_k_blocks": 16}),
        *q("two_kv_heads", _inputs(DECODE[:4]), checks=LIGHT, bugs=("F67",), **narrow, **two),
        *q("no_shared_expert", _inputs(CHUNKS[:3]), checks=LIGHT, **alone),
        *q("other_constants", _other, checks=LIGHT, **{**SMALL, **constants}),
        *q("biased", _biased(DECODE[:4]), checks=(*LIGHT, "overwritten"), **SMALL),
        *q("biased_chunks", _biased(CHUNKS[:2]), checks=LIGHT, **narrow, **SMALL),
        *q("strided", _strided, checks=LIGHT, bugs=("F65",), **narrow, **SMALL),
        *q("bad_token", _bad_token, checks=LIGHT, bugs=("F28",), **narrow, **SMALL),
        *q("two_ranks", _among(2, DECODE[:4]), checks=LIGHT, **SMALL),
        *q("two_ranks_of_experts", _among(2, CHUNKS[:3]), checks=LIGHT, **some),
        *q("four_ranks_of_experts", _among(4, DECODE[:4]), checks=LIGHT, **narrow, **quarter),
        *q("one_token", _inputs([(1, 514)]), bugs=("F32",), checks=LIGHT, **SMALL),
        *q("padded_only", _inputs([(1, 0), (2, 0)], max_k=256), bugs=("F14", "F30"), checks=LIGHT, **SMALL),
        *q("no_token", _inputs([(0, 128)]), checks=LIGHT, bugs=("F30",), quick=True, **SMALL),
    ]  # fmt: skip


def _formats() -> list[Case]:
    """Every pair of cache formats and page maps, and every storage format of experts, in bf16."""
    asked: dict[str, Any] = {"kind": "sparse_layer", "checks": LIGHT, "dtypes": ("bfloat16",), **SMALL}
    make = _inputs([(1, 700), (3, 200)])
    cases: list[Case] = []
    for main, index, layout in PAIRS:
        label, formats = _formats_of(main, index)
        quick = main == index in ("fp8_e4m3", "nvfp4") and layout in ("hnd", "msa_slot")
        cases += _in_map(OP, f"{label}_caches", make, layout, quick=quick, **asked, **formats)
    for format in STORED:
        cases += ask(OP, f"{format}_experts", _with_experts(format), weight_format=format, **asked)
    return cases


CASES = [*_plain(), *_formats()]
