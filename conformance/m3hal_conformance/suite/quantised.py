"""Stored formats: caches in every page map, weights and activations in every format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from m3hal import formats
from m3hal.formats import QTensor, nvfp4, spec_of
from m3hal.layouts import CACHE_FORMATS, KVLayout, PagedCache
from m3hal.ops import ExpertWeights
from m3hal.ops.kv_write import kv_write
from m3hal.shape import Site
from m3hal_conformance.case import Case, Inputs, Rng, dtype_of
from m3hal_conformance.inputs import Batch, hot_routing, index_inputs
from m3hal_conformance.suite._build import ask
from m3hal_conformance.suite._paged import Lengths, block_inputs, choose, requests

P = 128
#: around page boundaries, in every place of a quad of tokens, out of order; two rows write nothing
SLOTS = [127, 128, 0, -1, 3 * P + 5, 2 * P - 1, -1, 4 * P + 2, 1, 5 * P + 126]
MAIN = [(f, kind) for f in ("fp8_e4m3", "fp8_e4m3_240", "nvfp4") for kind in CACHE_FORMATS[f]]
INDEX = [*MAIN, *(("mxfp4", kind) for kind in CACHE_FORMATS["mxfp4"])]
STORED = ("fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4")
DECODE: Lengths = [(1, 1), (1, 127), (1, 128), (1, 129), (1, 300), (1, 0), (2, 1300), (0, 50)]
Edit = Callable[[Rng, Tensor], Tensor]


def _layout(site: Site, kind: str, index: bool) -> KVLayout:
    if index:
        return KVLayout(kind, site.index_format, site.page_size, 1, site.index_dim, False)  # type: ignore[arg-type]
    return KVLayout(kind, site.kv_format, site.page_size, site.num_kv_heads, site.head_dim, True)  # type: ignore[arg-type]


def _empty(layout: KVLayout, pages: int, rng: Rng, outer: int = 1) -> PagedCache:
    """Stale bytes only: NaN scales, or the largest or smallest ones; with global scales that are no power of two."""
    byte = 0xFF if rng.stale != rng.stale else 0x00 if rng.stale == 0 else 0x7E if rng.stale > 0 else 0xFE
    buf = torch.full((pages * outer, *layout.page_shape()), byte, dtype=torch.uint8)
    scales = (torch.tensor(0.37), torch.tensor(1.9)) if layout.has_values else ()
    return PagedCache(buf[outer - 1 :: outer], layout, *scales)


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


def _write(slots: list[int], edit: Edit = _as_they_are, *, index: bool = False, outer: int = 1):  # type: ignore[no-untyped-def]
    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        layout = _layout(site, kind, index)
        shape = (len(slots), layout.heads, layout.dim)
        k, v = (edit(rng, rng.normal(*shape)).to(dtype_of(site)) for _ in range(2))
        cache = _empty(layout, 6, rng, outer)
        return {"cache": cache, "k": k, "v": None if index else v, "slots": torch.tensor(slots, dtype=torch.int64)}

    return make


def _read(slots: list[int], *, index: bool = False, outer: int = 1):  # type: ignore[no-untyped-def]
    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        inputs = _write([slot for slot in slots if slot >= 0], _groups_apart, index=index, outer=outer)(rng, site, kind)
        kv_write(*inputs.values())
        return {"cache": inputs["cache"], "slots": torch.tensor(slots, dtype=torch.int64)}

    return make


def _copy(rng: Rng, site: Site, kind: str) -> Inputs:
    layout = _layout(site, kind, False)
    src, dst = _empty(layout, 6, rng), _empty(layout, 7, rng, outer=2)
    src.buf.copy_(rng.integers(0, 256, *src.buf.shape).to(torch.uint8))
    return {"src": src, "dst": dst, "pairs": torch.tensor([(3, 0), (0, 6), (-1, 2), (5, 5), (2, -1), (0, 1)])}


def _filled(held: Batch, layout: KVLayout, keys: list[Tensor], values: list[Tensor] | None, rng: Rng) -> PagedCache:
    cache = _empty(layout, held.pages, rng)
    for request, (_, length) in enumerate(held.lengths):
        if length:
            kv_write(cache, keys[request], None if values is None else values[request], held.slots(request))
    return cache


def _attention(sparse: bool):  # type: ignore[no-untyped-def]
    def make(rng: Rng, site: Site, kind: str) -> Inputs:
        held = requests(rng, DECODE, site.page_size)
        found = block_inputs(rng, site, held)
        kv = _filled(held, _layout(site, kind, False), list(found.keys), list(found.values), rng)
        chosen = {"block_ids": choose(rng, held, site, count=4)} if sparse else {}
        return {"q": found.q, "kv": kv, **chosen, "meta": held.meta}

    return make


def _needles(rng: Rng, site: Site, kind: str) -> Inputs:
    held = requests(rng, DECODE, site.page_size)
    index_q, keys = index_inputs(held, site.num_index_heads, site.index_dim, site.block_size, rng.generator)
    cache = _filled(held, _layout(site, kind, True), list(keys), None, rng)
    return {"index_q": index_q.to(dtype_of(site)), "index_cache": cache, "meta": held.meta}


def _in_maps(op: str, name: str, make: Any, maps: Sequence[tuple[str, str]], **options: Any) -> list[Case]:
    """The same question in every format and page map."""
    cases: list[Case] = []
    for format, kind in maps:
        bound = lambda rng, site, make=make, kind=kind: make(rng, site, kind)  # noqa: E731
        # an index cache lies in the page map of the main cache, so that one layout names both
        stored: dict[str, Any] = {"kv_format": "nvfp4" if format == "mxfp4" else format, "index_format": format}
        asked = {"kind": "sparse_attention", **stored, **options}
        cases += ask(op, f"{format}_{name}", bound, layouts=(kind,), **asked)
    return cases


def _caches() -> list[Case]:
    two: dict[str, Any] = {"tensor_parallel": 2}
    index: dict[str, Any] = {"tensor_parallel": 1, "bugs": ("F24", "F62")}
    decoded, stale = ("bytes_decoded",), ("stale",)
    blocks: dict[str, Any] = {"input_class": "blocks", "also": stale, "bugs": ("F19",)}

    def write(name: str, make: Any, **options: Any) -> list[Case]:
        return _in_maps("kv_write", name, make, MAIN, **{**two, **options})

    return [
        *write("page_boundaries", _write(SLOTS), also=decoded, quick=True, bugs=("F60", "F62")),
        *write("groups", _write(SLOTS, _groups_apart), also=decoded, bugs=("F60",), quick=True),
        *write("odd_values", _write(SLOTS, _odd), bugs=("F56",), quick=True),
        *write("block_outer", _write(SLOTS, outer=3), bugs=("F64",)),
        *write("four_heads", _write(SLOTS), tensor_parallel=1, also=decoded, bugs=("F60",)),
        *write("no_token", _write([]), bugs=("F30",)),
        *_in_maps("kv_write", "index", _write(SLOTS, index=True), INDEX, also=decoded, quick=True, **index),
        *_in_maps("kv_read", "page_boundaries", _read(SLOTS), MAIN, quick=True, bugs=("F60",), **two),
        *_in_maps("kv_read", "block_outer", _read(SLOTS, outer=3), MAIN, bugs=("F64",), **two),
        *_in_maps("kv_read", "index", _read(SLOTS, index=True), INDEX, **index),
        *_in_maps("kv_copy_blocks", "some_pages", _copy, MAIN, quick=True, bugs=("F24",), **two),
        *_in_maps("block_scores", "needles", _needles, INDEX, also=stale, input_class="needles", bugs=("F20",), **two),
        *_in_maps("sparse_attention", "decode", _attention(True), MAIN, quick=True, **blocks, **two),
        *_in_maps("paged_attention", "decode", _attention(False), MAIN, kind="dense_attention", **blocks, **two),
    ]


def _stored(x: Tensor, format: str) -> QTensor:
    """A weight [.., N, K]; in nvfp4 with a global scale for each entry of its leading axes."""
    if format == "nvfp4":
        return nvfp4.quantize(x, nvfp4.global_scale_of(x, own=x.ndim - 2))
    return formats.quantize(x, spec_of(format))


def _product(width: int, format: str):  # type: ignore[no-untyped-def]
    def make(rng: Rng, site: Site) -> Inputs:
        x, weight = rng.normal(9, width).to(dtype_of(site)), rng.normal(136, width) * width**-0.5
        return {"x": x, "weight": _stored(weight, format)}

    return make


def _experts(format: str):  # type: ignore[no-untyped-def]
    def make(rng: Rng, site: Site) -> Inputs:
        hidden, inner, count = 128, 96, 6
        size = 2.0 ** torch.arange(count)[:, None, None]
        w13 = rng.normal(count, 2 * inner, hidden) * (2 / hidden**0.5)
        w2 = rng.normal(count, hidden, inner) * inner**-0.5 * size
        weights, ids = hot_routing(17, count, 4, rng.generator)
        experts = ExpertWeights(_stored(w13, format), _stored(w2, format))
        return {"x": rng.normal(17, hidden).to(dtype_of(site)), "weights": weights, "ids": ids, "experts": experts}

    return make


def _weights() -> list[Case]:
    cases: list[Case] = []
    for format in STORED:
        stored: dict[str, Any] = {"weight_format": format, "kind": "moe", "quick": format in ("mxfp8", "nvfp4")}
        for width in (32, 96, 384, 416):
            cases += ask("linear", f"{format}_k_{width}", _product(width, format), bugs=("F59",), **stored)
        cases += ask("moe_experts", f"{format}_experts", _experts(format), bugs=("F52", "F57"), **stored)
    return cases


def _activations() -> list[Case]:
    def x(rows: int):  # type: ignore[no-untyped-def]
        return lambda rng, site: {"x": rng.normal(rows, 96) * torch.exp(2 * rng.normal(rows, 1))}

    def q(rng: Rng, site: Site) -> Inputs:
        return {"q": formats.quantize(rng.normal(7, 96), spec_of(site.activation_format))}

    cases: list[Case] = []
    for format in STORED:
        options: dict[str, Any] = {"kind": "dense_mlp", "activation_format": format, "quick": True}
        cases += ask("quantize", f"to_{format}", x(7), dtypes=("float32",), bugs=("F61",), **options)
        cases += ask("quantize", f"to_{format}_no_token", x(0), dtypes=("float32",), bugs=("F30",), **options)
        cases += ask("dequantize", f"from_{format}", q, bugs=("F52",), **options)
    return cases


CASES = [*_caches(), *_weights(), *_activations()]
