"""Where the codes and scales of a cache's keys and values lie, in one logical order for every layout.

Reading and writing are the same few lines for all formats and page maps because each is a set of strided views; the
interleaved value scales of nvfp4 pages too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from m3hal import formats
from m3hal._lazy import torch
from m3hal.formats import PLAIN_FORMATS, QTensor
from m3hal.layouts.paged import QUAD, KVLayout, PagedCache

Part = Literal["k", "v"]
_NO_TRAITS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Stored:
    """The keys, or the values, of a cache: views of its buffer.

    codes: [pages, heads, page_size, n], uint8 (n = bytes of one vector), or a plain format's elements (n = dim).
    scales: uint8 [pages, heads, page_size / 4, 4, groups]; None without block scales.
    global_scale: fp32 scalar or None.
    """

    layout: KVLayout
    codes: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None

    def take(self, page: torch.Tensor, offset: torch.Tensor) -> QTensor:
        """The vectors of tokens, [n, heads, ...]; page, offset: int64 [n]."""
        scale = None if self.scales is None else self.scales[page, :, offset // QUAD, offset % QUAD]
        return QTensor(self.codes[page, :, offset], self.layout.spec, scale, self.global_scale)

    def put(self, page: torch.Tensor, offset: torch.Tensor, vectors: QTensor) -> None:
        """The inverse of :meth:`take`."""
        self.codes[page, :, offset] = vectors.data
        if self.scales is not None and vectors.scale is not None:
            self.scales[page, :, offset // QUAD, offset % QUAD] = vectors.scale

    def take_pages(self, pages: torch.Tensor) -> QTensor:
        """All vectors of whole pages, [heads, len(pages) * page_size, ...]; pages: int64."""
        scale = None if self.scales is None else self.scales.transpose(0, 1)[:, pages].flatten(1, 3)
        codes = self.codes.transpose(0, 1)[:, pages].flatten(1, 2)
        return QTensor(codes, self.layout.spec, scale, self.global_scale)


def stored(cache: PagedCache, part: Part) -> Stored:
    """The views of a cache's keys or values. Raises ValueError for the values of an index cache."""
    layout = cache.layout
    layout.check_public()
    if part == "v" and not layout.has_values:
        raise ValueError("this cache holds index keys only; it has no values")
    global_scale = cache.k_scale if part == "k" else cache.v_scale
    if layout.spec.group == 0:
        return Stored(layout, _unscaled(cache, part), None, global_scale)
    codes, scales = _slots(cache, part) if layout.kind == "msa_slot" else _planes(cache, part)
    codes = codes.unflatten(-1, (layout.page_size, layout.spec.data_bytes(layout.dim)))  # type: ignore[no-untyped-call]
    return Stored(layout, codes, _in_quads(scales, layout, interleaved=part == "v"), global_scale)


def quantize_like(part: Stored, vectors: torch.Tensor, traits: Mapping[str, Any] = _NO_TRAITS) -> QTensor:
    """Vectors [..., dim], rounded once to the format in which the part is stored.

    traits: may hold ``kv_scale_used``, ``nvfp4_quantizer`` and ``mx_scale_rule``.
    """
    if part.layout.format in PLAIN_FORMATS:  # the buffer's dtype, not the layout's: an oracle stores fp64
        return QTensor(vectors.to(part.codes.dtype), part.layout.spec)
    if traits.get("nvfp4_quantizer") == "token_global":
        raise ValueError("a cache has one global scale, so no quantiser with one per token can write it")
    ignored = part.scales is None and traits.get("kv_scale_used") == "no"  # an fp8 cache's
    global_scale = None if ignored else part.global_scale
    return formats.quantize(vectors, part.layout.spec, global_scale, traits)


def _unscaled(cache: PagedCache, part: Part) -> torch.Tensor:
    """[pages, heads, page_size, dim] of hnd and nhd."""
    if cache.layout.format in PLAIN_FORMATS:
        return cache.k if part == "k" else cache.v
    by_head = cache.buf.view(torch.uint8)
    by_head = by_head if cache.layout.kind == "hnd" else by_head.transpose(1, 2)
    return by_head[..., : cache.layout.dim] if part == "k" else by_head[..., cache.layout.dim :]


def _slots(cache: PagedCache, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [pages, heads, page_size * n] and scales [pages, heads, page_size * groups] of msa_slot."""
    layout = cache.layout
    slots, size = cache.buf.view(torch.uint8), layout.page_bytes() // (layout.heads * layout.parts)
    try:
        slots = slots.view(*slots.shape[:2], size)[:, int(part == "v") :: layout.parts]
    except RuntimeError as error:  # flattening would copy, and what is written to a copy is lost
        raise ValueError("a slot of msa_slot is contiguous; only pages and slots may lie apart") from error
    end = layout.page_size * layout.spec.data_bytes(layout.dim)
    return slots[..., :end], slots[..., end:]


def _planes(cache: PagedCache, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of planar, shaped as in :func:`_slots`."""
    layout, page = cache.layout, cache.buf.view(torch.uint8)
    codes, scales = (
        layout.page_size * n for n in (layout.spec.data_bytes(layout.dim), layout.spec.scale_bytes(layout.dim))
    )
    start = layout.heads * (codes + scales) * int(part == "v")
    middle, end = start + layout.heads * codes, start + layout.heads * (codes + scales)
    return page[:, start:middle].view(-1, layout.heads, codes), page[:, middle:end].view(-1, layout.heads, scales)


def _in_quads(scales: torch.Tensor, layout: KVLayout, interleaved: bool) -> torch.Tensor:
    """[pages, heads, page_size / 4, 4, groups] of linear or interleaved scale bytes [pages, heads, n]."""
    quads, groups = layout.page_size // QUAD, layout.spec.scale_bytes(layout.dim)
    if interleaved:
        return scales.view(*scales.shape[:2], quads, groups, QUAD).transpose(-1, -2)
    return scales.view(*scales.shape[:2], quads, QUAD, groups)
