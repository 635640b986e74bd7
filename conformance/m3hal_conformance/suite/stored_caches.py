"""Caches in every stored format and page map: written, read, copied, attended to, scored and inserted into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m3hal.layouts import CACHE_FORMATS, PagedCache
from m3hal.ops.kv_write import kv_write
from m3hal.shape import Site
from m3hal_conformance.case import Case, Inputs, MakeIn, Rng, dtype_of
from m3hal_conformance.suite._build import LIGHT, ask, in_wide_row
from m3hal_conformance.suite._paged import Lengths, apart, empty, index_layout, kv_layout
from m3hal_conformance.suite.attention import _few
from m3hal_conformance.suite.attention import _inputs as attention
from m3hal_conformance.suite.indexer import _needles as needles
from m3hal_conformance.suite.insert import _inputs as insert

P = 128
#: around page boundaries, in every place of a quad of tokens, out of order; two rows write nothing
SLOTS = [127, 128, 0, -1, 3 * P + 5, 2 * P - 1, -1, 4 * P + 2, 1, 5 * P + 126]
MAIN = [(f, kind) for f in ("fp8_e4m3", "fp8_e4m3_240", "nvfp4") for kind in CACHE_FORMATS[f]]
FP8 = [(f, kind) for f, kind in MAIN if f.startswith("fp8")]
FOUR_BITS = [(f, kind) for f, kind in MAIN if f == "nvfp4"]
INDEX = [*MAIN, *(("mxfp4", kind) for kind in CACHE_FORMATS["mxfp4"])]
FOUR_BITS_INDEX = [(f, kind) for f, kind in INDEX if f in ("nvfp4", "mxfp4")]
DECODE: Lengths = [(1, 1), (1, 127), (1, 128), (1, 129), (1, 300), (1, 0), (2, 1300), (0, 50)]
Edit = Callable[[Rng, Tensor], Tensor]


def _as_they_are(rng: Rng, x: Tensor) -> Tensor:
    return x


def _groups_apart(rng: Rng, x: Tensor) -> Tensor:
    """Group g of a vector has magnitude g + 1: a scale read from another group or token shows at once."""
    magnitude = (torch.arange(x.shape[-1]) // 16 + 1).to(x.dtype)
    return x.sign() * magnitude * (torch.arange(len(x)) % 5 + 1).view(-1, 1, 1)


def _odd(rng: Rng, x: Tensor) -> Tensor:
    """Zeros of both signs, a group of zeros, ties of E2M1 at its scale, and what saturates."""
    x[..., :16] = 0.0
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    x[..., 16:32] = torch.tensor([6, -0.0, *ties, *(-tie for tie in ties)])
    x[..., 32] = 3e4
    x[0, ..., 40] = float("inf")
    return x


def _nibbles(rng: Rng, x: Tensor) -> Tensor:
    """Even elements are small and odd ones large, so that exchanged halves of bytes exchange the two."""
    return torch.where(torch.arange(x.shape[-1]) % 2 == 0, 0.5, 6.0) * x.sign()


def _ties(rng: Rng, x: Tensor) -> Tensor:
    """Whole and half steps of every format's codes in groups of 16, times the global scale: rounded to even, or wrong.

    Each group begins with 6, so that the scale of a four-bit group is that of the group itself.
    """
    step = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 1.0625])
    size = torch.exp2(rng.integers(-3, 4, *x.shape[:-1], x.shape[-1] // 16).float())
    return (step * size[..., None]).flatten(-2)


def _write(
    slots: list[int], edit: Edit = _as_they_are, *, index: bool = False, outer: int = 1, pages: int = 6
) -> MakeIn:
    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        layout = index_layout(site, kind) if index else kv_layout(site, kind)
        shape = (len(slots), layout.heads, layout.dim)
        k, v = (edit(rng, rng.normal(*shape)).to(dtype_of(site)) for _ in range(2))
        cache = empty(layout, pages, rng, outer)
        return {"cache": cache, "k": k, "v": None if index else v, "slots": torch.tensor(slots, dtype=torch.int64)}

    return make


def _spread(make: MakeIn) -> MakeIn:
    """The same question, with every cache's rows, slots or pages further apart than their bytes need."""
    return lambda rng, site, kind: {
        name: apart(value) if isinstance(value, PagedCache) else value for name, value in make(rng, site, kind).items()
    }


def _labelled(make: MakeIn) -> MakeIn:
    """The same bytes, labelled with torch's one-byte float; engines label them either way."""

    def labelled(cache: PagedCache) -> PagedCache:
        return replace(cache, buf=cache.buf.view(torch.float8_e4m3fn))

    return lambda rng, site, kind: {
        name: labelled(value) if isinstance(value, PagedCache) else value
        for name, value in make(rng, site, kind).items()
    }


def _fused_row(rng: Rng, site: Site, kind: str) -> Inputs:
    """k and v as slices of the projection's row."""
    inputs = _write(SLOTS)(rng, site, kind)
    heads, dim = site.num_kv_heads, site.head_dim
    row = in_wide_row(torch.cat([inputs["k"].flatten(1), inputs["v"].flatten(1)], -1), 64, 8)
    k, v = row.split(heads * dim, -1)  # type: ignore[no-untyped-call]
    return {**inputs, "k": k.unflatten(1, (heads, dim)), "v": v.unflatten(1, (heads, dim))}


def _read(slots: list[int], *, index: bool = False, outer: int = 1) -> MakeIn:
    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        inputs = _write([slot for slot in slots if slot >= 0], _groups_apart, index=index, outer=outer)(rng, site, kind)
        kv_write(*inputs.values())
        return {"cache": inputs["cache"], "slots": torch.tensor(slots, dtype=torch.int64)}

    return make


def _copy(rng: Rng, site: Site, kind: str) -> Inputs:
    layout = kv_layout(site, kind)
    src, dst = empty(layout, 6, rng), empty(layout, 7, rng, outer=2)
    src.buf.copy_(rng.integers(0, 256, *src.buf.shape).to(torch.uint8))
    return {"src": src, "dst": dst, "pairs": torch.tensor([(3, 0), (0, 6), (-1, 2), (5, 5), (2, -1), (0, 1)])}


def _insert(slots: list[int], positions: list[int], edit: Edit = _as_they_are, **options: Any) -> MakeIn:
    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        inputs = insert(slots, positions, **options)(rng, site, kind)
        return {**inputs, "qkv": edit(rng, inputs["qkv"].float()).to(dtype_of(site))}

    return make


def _scaled(rng: Rng, row: Tensor) -> Tensor:
    """Every 16 neighbours have a size of their own, which no norm over a head takes away."""
    size = torch.exp2(rng.uniform(-3, 3, 1, row.shape[1] // 16)).repeat_interleave(16, -1)
    return row * size


def _in_maps(op: str, name: str, make: Any, maps: Sequence[tuple[str, str]], **options: Any) -> list[Case]:
    """The same question in every format and page map."""
    cases: list[Case] = []
    for format, kind in maps:
        # an index cache lies in the page map of the main cache, so that one layout names both
        stored = {"kv_format": "nvfp4" if format == "mxfp4" else format, "index_format": format}
        asked = {**stored, **options}
        if not op.startswith("kv_"):  # of what is computed from a page, one map of each format is quick
            asked["quick"] = options.get("quick", False) and kind == CACHE_FORMATS[format][0]
        cases += _in_map(op, f"{format}_{name}", make, kind, **asked)
    return cases


def _in_map(op: str, name: str, make: Any, layout: str, **options: Any) -> list[Case]:
    bound = lambda rng, site: make(rng, site, layout)  # noqa: E731
    return ask(op, name, bound, layouts=(layout,), **{"kind": "sparse_attention", **options})


def _main_caches() -> list[Case]:
    two: dict[str, Any] = {"tensor_parallel": 2}
    decoded = ("bytes_decoded",)

    def write(name: str, make: Any, **options: Any) -> list[Case]:
        return _in_maps("kv_write", name, make, MAIN, **{**two, **options})

    def read(name: str, make: Any, **options: Any) -> list[Case]:
        return _in_maps("kv_read", name, make, MAIN, **{**two, **options})

    return [
        *write("page_boundaries", _write(SLOTS), also=decoded, quick=True, bugs=("F60", "F62")),
        *write("groups", _write(SLOTS, _groups_apart), also=decoded, bugs=("F60", "F70"), quick=True),
        *write("odd_values", _write(SLOTS, _odd), bugs=("F56",), quick=True),
        *_in_maps("kv_write", "nibbles", _write(SLOTS, _nibbles), FOUR_BITS, also=decoded, bugs=("F55",), **two),
        *write("block_outer", _write(SLOTS, outer=3), bugs=("F64",)),
        *write("apart", _spread(_write(SLOTS)), bugs=("F64",), quick=True),
        *write("fused_row", _fused_row, bugs=("F65",)),
        *write("four_heads", _write(SLOTS), tensor_parallel=1, also=decoded, bugs=("F60",)),
        *write("one_head", _write(SLOTS), tensor_parallel=4, also=decoded, bugs=("F60", "F67")),
        *write("tokens_200", _write([(7 * n + 3) % (6 * P) if n % 9 else -1 for n in range(200)]), bugs=("F68",),
               tensor_parallel=4),
        *write("all_padded", _write([-1, -1, -1]), bugs=("F29",)),
        *write("no_token", _write([]), bugs=("F30",)),
        *_in_maps("kv_write", "labelled", _labelled(_write(SLOTS)), FP8, bugs=("F62",), **two),
        *read("page_boundaries", _read(SLOTS), quick=True, bugs=("F60",)),
        *read("block_outer", _read(SLOTS, outer=3), bugs=("F64",)),
        *read("apart", _spread(_read(SLOTS)), bugs=("F64",), quick=True),
        *read("no_token", _read([]), bugs=("F30",)),
        *_in_maps("kv_copy_blocks", "some_pages", _copy, MAIN, quick=True, bugs=("F24",), **two),
        *_in_maps("kv_copy_blocks", "apart", _spread(_copy), MAIN, bugs=("F64",), **two),
    ]  # fmt: skip


def _index_caches() -> list[Case]:
    index: dict[str, Any] = {"tensor_parallel": 1, "bugs": ("F24", "F62")}
    scored: dict[str, Any] = {"tensor_parallel": 2, "input_class": "needles"}
    long: Lengths = [(1, 2500), (2, 3000), (1, 129), (1, 0)]

    def scores(name: str, make: Any, **options: Any) -> list[Case]:
        return _in_maps("block_scores", name, make, INDEX, **{**scored, **options})

    return [
        *_in_maps("kv_write", "index", _write(SLOTS, index=True), INDEX, also=("bytes_decoded",), quick=True, **index),
        *_in_maps("kv_write", "index_nibbles", _write(SLOTS, _nibbles, index=True), FOUR_BITS_INDEX,
                  also=("bytes_decoded",), bugs=("F55",)),
        *_in_maps("kv_write", "index_apart", _spread(_write(SLOTS, index=True)), INDEX, **index),
        *_in_maps("kv_read", "index", _read(SLOTS, index=True), INDEX, **index),
        *scores("needles", needles(DECODE), also=("stale", "permuted_pages", "permuted_requests", "row_alone"),
                bugs=("F20", "F21"), quick=True),
        *scores("apart", _spread(needles(DECODE[:5])), bugs=("F64",)),
        *scores("chunks", needles([(24, 700), (9, 140)]), also=("chunked",), bugs=("F22", "F23")),
        *scores("page_64", needles([(2, 300), (1, 129)]), page_size=64, bugs=("F25",)),
        *scores("no_token", needles([(0, 128)]), bugs=("F30",)),
        *_in_maps("select_blocks", "long", needles(long), INDEX, also=("stale",), bugs=("F20",), quick=True,
                  **scored),
    ]  # fmt: skip


def _asked(
    op: str, asked: Mapping[str, Any], name: str, make: MakeIn, maps: Sequence[tuple[str, str]] = MAIN, **options: Any
) -> list[Case]:
    return _in_maps(op, name, make, maps, **{**asked, **options})


def _attention() -> list[Case]:
    """Both attention operators over every cache format; what differs from plain caches is how a key is read."""
    relations = ("stale", "permuted_pages", "permuted_requests", "row_alone")
    cases: list[Case] = []
    for op, kind, ids in (("sparse_attention", "sparse_attention", _few), ("paged_attention", "dense_attention", None)):
        asked: dict[str, Any] = {"kind": kind, "input_class": "blocks", "tensor_parallel": 2, "return_lse": True}

        q = partial(_asked, op, asked)

        cases += [
            *q("decode", attention(DECODE, ids), also=relations, bugs=("F19", "F21", "F60"), quick=True),
            *q("ragged", attention([(5, 5), (3, 130), (1, 257), (2, 0), (17, 640)], ids), also=("stale",)),
            *q("apart", _spread(attention(DECODE[:5], ids)), bugs=("F64",)),
            *q("labelled", _labelled(attention(DECODE[:5], ids)), FP8, bugs=("F62",)),
            *q("all_heads", attention([(1, 300), (2, 130)], ids), tensor_parallel=1, bugs=("F60", "F67")),
            *q("tp8", attention(DECODE[:5], ids), tensor_parallel=8, bugs=("F67",)),
            *q("page_64", attention([(2, 300), (1, 129)], ids), page_size=64, bugs=("F25",)),
            *q("no_token", attention([(0, 128)], ids), bugs=("F30",)),
        ]
    return cases


#: (main cache, index cache, layout of the plan): what engines pair, in every page map; "" is the site's dtype
PAIRS = [
    ("fp8_e4m3", "fp8_e4m3", "hnd"), ("fp8_e4m3", "fp8_e4m3", "nhd"), ("fp8_e4m3", "", "hnd"), ("", "fp8_e4m3", "nhd"),
    ("fp8_e4m3_240", "fp8_e4m3_240", "hnd"), ("fp8_e4m3_240", "fp8_e4m3_240", "nhd"),
    ("nvfp4", "nvfp4", "msa_slot"), ("nvfp4", "nvfp4", "planar"), ("nvfp4", "", "msa_slot"),
    ("nvfp4", "fp8_e4m3", "msa_slot"), ("nvfp4", "mxfp4", "msa_slot"), ("nvfp4", "mxfp4", "planar"),
    ("fp8_e4m3", "mxfp4", "hnd"),
]  # fmt: skip


def _formats_of(main: str, index: str) -> tuple[str, dict[str, Any]]:
    """The label of a pair in the names of cases, and its site's formats."""
    found = {name: f or (lambda dtype: dtype) for name, f in (("kv_format", main), ("index_format", index))}
    return "_".join(dict.fromkeys(f or "plain" for f in (main, index))), found


def _beside() -> list[Case]:
    """Index caches whose page map follows from the main cache's: bf16 keys beside msa_slot pages lie in hnd."""
    cases: list[Case] = []
    for main, index, layout in PAIRS:
        if main == index:
            continue
        label, stored = _formats_of(main, index)
        asked: dict[str, Any] = {"tensor_parallel": 2, "bugs": ("F24", "F62"), **stored}
        cases += _in_map("kv_write", f"{label}_index", _write(SLOTS, index=True), layout, **asked)
        scored = {"input_class": "needles", "also": ("stale",), **asked}
        cases += _in_map("block_scores", f"{label}_needles", needles(DECODE), layout, **scored)
        cases += _in_map("select_blocks", f"{label}_long", needles([(1, 2500), (2, 3000)]), layout, **scored)
    return cases


def _inserts() -> list[Case]:
    slots, at = [127, 128, -1, 5 * P + 127, 0, 3 * P, -1], [127, 128, 0, 4095, 1, 640, 77]
    other = [1, 2, 3, 4 * P, -1, 9, 6 * P]
    many = [(13 * n + 5) % (7 * P) if n % 7 else -1 for n in range(66)]
    questions: list[tuple[str, Any, dict[str, Any]]] = [
        ("page_boundaries", _insert(slots, at), {"quick": True, "bugs": ("F60", "F68")}),
        ("groups", _insert(slots, at, _scaled), {"bugs": ("F60", "F70"), "quick": True}),
        ("apart", _spread(_insert(slots, at)), {"bugs": ("F64",)}),
        ("own_index_slots", _insert(slots, at, index_slots=other), {"bugs": ("F24",)}),
        ("two_kv_heads", _insert(slots, at), {"tensor_parallel": 2, "bugs": ("F67",)}),
        ("tokens_66", _insert(many, [31 * n % 4096 for n in range(66)]), {"bugs": ("F68",), "checks": LIGHT}),
        ("dense_layer", _insert(slots, at), {"kind": "dense_attention"}),
        ("all_padded", _insert([-1, -1, -1], [0, 0, 0]), {"bugs": ("F29",)}),
        ("no_token", _insert([], []), {"bugs": ("F30",)}),
    ]
    cases: list[Case] = []
    for main, index, kind in PAIRS:
        label, stored = _formats_of(main, index)
        for name, make, options in questions:
            if name == "dense_layer" and main != index:  # a dense layer has no index cache; once for each main format
                continue
            asked = {"tensor_parallel": 4, **stored, **options}
            cases += _in_map("qk_norm_rope_insert", f"{label}_{name}", make, kind, **asked)
    return cases


CASES = [*_main_caches(), *_index_caches(), *_beside(), *_attention(), *_inserts()]
