"""Sizes and views between those that the other cases ask: what a wrong backend passed them with.

A backend written from the documentation alone was wrong at 18 to 62 tokens, at 1,100, at 300 requests, at a million
tokens of context, with pages of 16, and where a vector is not contiguous. Each case has one of these and is thin
besides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from m3hal.ops.rope_partial import rope_table
from m3hal_conformance.case import Case, Inputs, Make, MakeIn, Rng, Site, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask, every_other, in_wide_row
from m3hal_conformance.suite._paged import Lengths
from m3hal_conformance.suite.attention import _few
from m3hal_conformance.suite.attention import _inputs as attention
from m3hal_conformance.suite.engine import _TYPICAL as TYPICAL
from m3hal_conformance.suite.experts import NAN, _hot, _logits, _moe_inputs
from m3hal_conformance.suite.indexer import _needles as needles
from m3hal_conformance.suite.insert import POSITIONS
from m3hal_conformance.suite.insert import SLOTS as INSERTED
from m3hal_conformance.suite.insert import _inputs as insert
from m3hal_conformance.suite.kv_cache import SLOTS, _copy, _read, _write
from m3hal_conformance.suite.ranking import ONE, VISIBLE, _normal, _scores, _sharded

P = 128
#: token counts between a warp and a tile, and past 1,024 without filling a tile
BETWEEN = (32, 1100)
#: slots and pages that name nothing; in 32 bits the last one is zero
NOWHERE = (-2, -129, -(2**40))
ROWS = (*LIGHT, "permuted_rows")
ONCE = ("oracle", "written", "permuted_requests")
#: the model's whole context, but for a part of the last page
FULL = (1 << 20) - 37
#: as long as an exact attention stays cheap
LONG = 140_000


def _hnd(make: MakeIn) -> Make:
    return lambda rng, site: make(rng, site, "hnd")


def _drawn(names: str, tokens: int, width: int, weight: tuple[int, ...] = ()) -> Make:
    """Normal numbers [tokens, width] by name, and a weight a tenth of the size."""

    def make(rng: Rng, site: Site) -> Inputs:
        inputs = {name: rng.normal(tokens, width).to(dtype_of(site)) for name in names.split()}
        return inputs | ({"weight": (0.1 * rng.normal(*weight)).to(dtype_of(site))} if weight else {})

    return make


def _rotated(tokens: int) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        x, table = rng.normal(tokens, 2, 128).to(dtype_of(site)), rope_table(4096, site.rotary_dim, 5e6)
        return {"x": x, "positions": rng.integers(0, 4096, tokens), "cos_sin": table}

    return make


def _inserted(tokens: int) -> Make:
    """Tokens in any order; those that find no slot of seven pages are padded."""

    def make(rng: Rng, site: Site) -> Inputs:
        order = rng.permutation(max(7 * P, tokens))[:tokens]
        return insert(torch.where(order < 7 * P, order, -1).tolist(), rng.integers(0, 4096, tokens).tolist())(rng, site)

    return make


def _written(tokens: int, pages: int = 12) -> Make:
    slots = [(37 * n + 11) % (pages * P) for n in range(tokens)]
    return _hnd(_write(slots, pages=pages))


def _counts() -> list[Case]:
    """Every operator with a token axis, at the counts between."""
    sparse: dict[str, Any] = {"kind": "sparse_attention", "checks": ROWS, "bugs": ("F68",)}
    moe = {**sparse, "kind": "moe"}
    small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 8}
    ranked: dict[str, Any] = {"dtypes": ONE, "max_context": 1 << 20}
    insert_12 = {**sparse, "tensor_parallel": 8, "checks": LIGHT, "quick": True}
    cases = ask("qk_norm_rope_insert", "tokens_12", _inserted(12), **insert_12)
    for tokens in BETWEEN:
        name, visible = f"tokens_{tokens}", [n % 41 for n in range(tokens)]
        asked: list[tuple[str, Make, dict[str, Any]]] = [
            ("rms_norm", _drawn("x", tokens, 128, (128,)), sparse),
            ("add_rms_norm", _drawn("x residual", tokens, 128, (128,)), sparse),
            ("linear", _drawn("x", tokens, 128, (64, 128)), sparse),
            ("rope_partial", _rotated(tokens), sparse),
            ("swiglu_oai", _drawn("gate_up", tokens, 64), moe),
            ("moe_experts", _moe_inputs(tokens, _hot, 64, 32), {**moe, **small}),
            ("route_topk", _logits(tokens), {**moe, "dtypes": ONE}),
            ("quantize", _drawn("x", tokens, 64), {**moe, "activation_format": "mxfp8"}),
            ("kv_write", _written(tokens), {**sparse, "tensor_parallel": 4}),
            ("topk_blocks", _scores(_normal, visible, 40), {**sparse, **ranked}),
            ("merge_topk", _sharded(2, _normal, visible), {**sparse, **ranked}),
            ("qk_norm_rope_insert", _inserted(tokens), {**sparse, "tensor_parallel": 8, "checks": LIGHT}),
        ]
        dense: dict[str, Any] = {"kind": "dense_attention", "tensor_parallel": 8, "checks": LIGHT, "bugs": ("F68",)}
        cases += ask("qk_norm_rope_insert", f"{name}_dense", _inserted(tokens), **dense)
        for operator, make, options in asked:
            cases += ask(operator, name, make, quick=tokens == 32, **options)
    return cases


def _widths() -> list[Case]:
    """Sums as long as M3's longest ones, on one device; few columns, or few rows of K, keep them cheap."""
    dense: dict[str, Any] = {"checks": ROWS, "kind": "dense_mlp"}
    named = {"o_proj": (8192, 192), "dense_down": (12_288, 192), "dense_gate_up": (128, 24_576)}
    cases = [
        case
        for name, (k, n) in named.items()
        for case in ask("linear", f"{name}_tp1", _sum_of(3, k, n), bugs=("F59",), **dense)
    ]
    return [
        *cases,
        *ask("swiglu_oai", "dense_mlp_tp1_3", _drawn("gate_up", 3, 24_576), **dense),
    ]


def _sum_of(tokens: int, k: int, n: int) -> Make:
    def make(rng: Rng, site: Site) -> Inputs:
        weight = (rng.normal(n, k) * k**-0.5).to(dtype_of(site))
        return {"x": rng.normal(tokens, k).to(dtype_of(site)), "weight": weight}

    return make


#: requests of one or two query tokens, a padded one among every ten, that see up to two pages
MANY: Lengths = [(1 + n % 3 // 2, 0 if n % 10 == 9 else 60 + 17 * n % 190) for n in range(300)]
#: one prompt, longer than a kernel's grid of 1,024 and no multiple of a tile
PROMPT: Lengths = [(1100, 1161), (2, 140)]


def _repeated(make: Make, cache: str, length: int) -> Make:
    """The last request's length becomes ``length``: its table repeats the pages that it has.

    Its last pages, whose index keys are the largest, come once each, far apart: they alone are worth selecting.
    """

    def repeated(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site)
        meta, paged = inputs["meta"], inputs[cache]
        own, count = meta.block_table[-1, : int(meta.seq_lens[-1]) // paged.layout.page_size], -(-length // P)
        table = torch.zeros(len(meta.block_table), count + 1, dtype=torch.int32)
        table[:, : meta.block_table.shape[1]] = meta.block_table
        table[-1, :count] = own[:-16].repeat(-(-count // len(own[:-16])))[:count]
        table[-1, torch.linspace(70, count - 1, 16).long()] = own[-16:]
        if not paged.layout.has_values:
            paged.k[own[-16:].long()] *= 8
        lengths = torch.cat([meta.seq_lens[:-1], torch.tensor([length], dtype=torch.int32)])
        return {**inputs, "meta": replace(meta, block_table=table, seq_lens=lengths, max_k=length)}

    return repeated


def _far_ids(make: Make) -> Make:
    """The last token selects blocks over the whole length, the newest one last."""

    def far(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site)
        newest, ids = (int(inputs["meta"].seq_lens[-1]) - 1) // site.block_size, inputs["block_ids"]
        ids[-1] = torch.linspace(1, newest, ids.shape[-1]).int()
        return inputs

    return far


def _requests() -> list[Case]:
    """Long prompts, many requests, a million tokens, and pages smaller and larger than a block."""
    sparse: dict[str, Any] = {"kind": "sparse_attention", "tensor_parallel": 4}
    blocks: dict[str, Any] = {"input_class": "blocks", "return_lse": True}
    operators: dict[str, tuple[Any, dict[str, Any]]] = {
        "sparse_attention": (lambda lengths: attention(lengths, _few), {**sparse, **blocks}),
        "paged_attention": (lambda lengths: attention(lengths, None), {**sparse, **blocks, "kind": "dense_attention"}),
        "block_scores": (needles, {**sparse, "input_class": "needles"}),
        "select_blocks": (needles, {**sparse, "input_class": "needles"}),
    }
    cases: list[Case] = []
    for operator, (of, asked) in operators.items():
        many = {**asked, "max_seqs": 512, "checks": (*LIGHT, "permuted_requests"), "tensor_parallel": 8}
        if operator.endswith(("scores", "blocks")):
            many["tensor_parallel"] = 4
        cases += [
            *ask(operator, "prompt_1100", of(PROMPT), checks=(*LIGHT, "permuted_requests"), bugs=("F68",), **asked),
            *ask(operator, "batch_300", of(MANY), bugs=("F68",), **many),
        ]
        for size in (16, 32, 256, 512):
            cases += ask(operator, f"page_{size}_odd_lengths", of([(2, 300), (1, 129), (1, 1041)]), page_size=size,
                         bugs=("F25",), quick=size == 16 and operator == "block_scores", **asked)  # fmt: skip
    million: dict[str, Any] = {"max_context": 1 << 20, "dtypes": ("bfloat16",), "checks": ONCE, "bugs": ("F15", "F63")}
    for operator in ("block_scores", "select_blocks"):
        of, asked = operators[operator]
        make = _repeated(of([(1, 300), (1, 40 * P)]), "index_cache", FULL)
        cases += ask(operator, "context_1m", make, **million, **asked)
    for operator in ("sparse_attention", "paged_attention"):
        of, asked = operators[operator]
        make = _repeated(of([(1, 300), (1, 40 * P)]), "kv", LONG)
        make = _far_ids(make) if operator == "sparse_attention" else make
        cases += ask(operator, "context_140k", make, **{**asked, **million, "tensor_parallel": 8})
    return cases


def _negative() -> list[Case]:
    """-1 is not the only slot or page that names nothing."""
    slots = [127, NOWHERE[0], 0, -1, 3 * P + 5, NOWHERE[1], NOWHERE[2], 5 * P + 126]
    inserted = [127, NOWHERE[0], 5, 5 * P + 127, NOWHERE[1], 3 * P, NOWHERE[2]]
    pairs = [(3, 0), (NOWHERE[0], 6), (2, NOWHERE[0]), (0, NOWHERE[2]), (NOWHERE[2], 1), (NOWHERE[1], 4), (5, 2)]
    one: dict[str, Any] = {"kind": "sparse_attention", "tensor_parallel": 4, "quick": True, "bugs": ("F29",)}
    index = _write(slots, index=True)
    return [
        *ask("kv_write", "other_negatives", _hnd(_write(slots)), also=("permuted_rows",), **one),
        *ask("kv_write", "other_negatives_index", _hnd(index), **{**one, "quick": False}),
        *ask("kv_read", "other_negatives", _hnd(_read(slots)), also=("permuted_rows",), **one),
        *ask("kv_copy_blocks", "other_negatives", _hnd(_copy(pairs)), **one),
        *ask("kv_copy_blocks", "other_negatives_index", _hnd(_copy(pairs, index=True)), **one),
        *ask("qk_norm_rope_insert", "other_negatives", insert(inserted, POSITIONS), **one),
        *ask("qk_norm_rope_insert", "other_negatives_dense", insert(inserted, POSITIONS), **{
            **one, "kind": "dense_attention"}),
    ]  # fmt: skip


def _few_numbers(rng: Rng, site: Site) -> Inputs:
    """Row n has n numbers and NaN else: fewer than k choices that mean anything, in any place."""
    inputs = _logits(site.top_k_experts + 2)(rng, site)
    for row, logits in enumerate(inputs["logits"]):
        logits[rng.permutation(len(logits))[row:]] = NAN
    return inputs


def _choices() -> list[Case]:
    ranked: dict[str, Any] = {"kind": "sparse_attention", "dtypes": ONE, "max_context": 1 << 20, "bugs": ("F35",)}
    routed: dict[str, Any] = {"kind": "moe", "dtypes": ONE, "also": ("row_alone", "permuted_rows")}
    cases: list[Case] = []
    for ranks in (3, 5, 7):
        make = _sharded(ranks, _normal, [*VISIBLE, 3, 4, 5, 200])
        cases += ask("merge_topk", f"ranks_{ranks}", make, also=("permuted_rows",), quick=ranks == 3, **ranked)
    for experts in (16, 32, 64, 256):
        cases += ask("route_topk", f"experts_{experts}", _logits(5, experts=experts), num_experts=experts, **routed)
    return [
        *cases,
        *ask("route_topk", "few_numbers", _few_numbers, quick=True, bugs=("F28",), **routed),
    ]


def _spread(make: Make, *names: str) -> Make:
    """The same inputs, some vectors with a doubled stride, tables as slices of wider rows."""

    def view(tensor: Tensor) -> Tensor:
        return every_other(tensor, 0) if tensor.ndim == 1 else in_wide_row(tensor)

    def spread(rng: Rng, site: Site) -> Inputs:
        inputs = make(rng, site)
        return {name: view(value) if name in names else value for name, value in inputs.items()}

    return spread


def _views() -> list[Case]:
    one: dict[str, Any] = {"kind": "sparse_attention", "bugs": ("F65",), "quick": True}
    two, ranked = {**one, "tensor_parallel": 4}, {**one, "dtypes": ONE, "max_context": 1 << 20}
    vectors = ("positions", "slots", "index_slots", "cos_sin")
    inserted = insert(INSERTED, POSITIONS, index_slots=[1, 2, 3, 4 * P, -1, 9, 6 * P])
    wide = _scores(_normal, VISIBLE, 40)
    return [
        *ask("rope_partial", "spread_positions", _spread(_rotated(9), "positions"), **one),
        *ask("rope_partial", "spread_table", _spread(_rotated(9), "cos_sin"), **one),
        *ask("kv_write", "spread_slots", _spread(_hnd(_write(SLOTS)), "slots"), **two),
        *ask("kv_read", "spread_slots", _spread(_hnd(_read(SLOTS)), "slots"), **two),
        *ask("qk_norm_rope_insert", "spread_vectors", _spread(inserted, *vectors), **two),
        *ask("topk_blocks", "spread_visible", _spread(wide, "visible_blocks"), also=("row_alone",), **ranked),
        *ask("merge_topk", "spread_visible", _spread(_sharded(4, _normal, VISIBLE), "visible_blocks"), **ranked),
    ]  # fmt: skip


def _page_sizes() -> list[Case]:
    """Pages that no other case has, with tokens around the ends of them."""
    cases: list[Case] = []
    for size in (32, 64, 256, 512):
        slots = [size - 1, size, 0, -1, 3 * size + 5, 2 * size - 1, 5 * size + size - 2]
        one: dict[str, Any] = {"kind": "sparse_attention", "tensor_parallel": 4, "page_size": size, "bugs": ("F25",)}
        cases += ask("kv_write", f"page_{size}", _hnd(_write(slots)), **one)
        cases += ask("kv_read", f"page_{size}_ends", _hnd(_read(slots)), **one)
        cases += ask("qk_norm_rope_insert", f"page_{size}", insert(slots, POSITIONS), **one)
    return cases


_RELATIONS = ("permuted_rows", "row_alone", "permuted_requests", "chunked")


def production_cases(cases: Iterable[Case]) -> list[Case]:
    """The typical case of each operator at a site that is bound for a server's batches, not for the suite's."""
    return [
        replace(
            case,
            id=f"{case.operator}/production_bounds/{case.format}",
            site=replace(case.site, max_tokens=16_384, max_seqs=1024),
            checks=("oracle", "written", *[c for c in case.checks if c in _RELATIONS][:1]),
            bugs=("F68",),
            golden=None,
            quick=False,
        )
        for case in cases
        if case.layout == "hnd" and case.id.split("/")[1] == TYPICAL.get(case.operator)
    ]


CASES = [
    *_counts(),
    *_widths(),
    *_requests(),
    *_negative(),
    *_choices(),
    *_views(),
    *_page_sizes(),
]
