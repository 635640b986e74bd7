"""A paged KV cache: ``(buffer, layout, scales)``.

A layout says how a page's bytes hold keys and values; a block-outer cache is no layout of its own but a stride of the
buffer. ``PagedCache.k`` and ``.v`` give the plain formats (fp32, bf16) as strided views in one logical order, so a
definition, and a kernel that takes strides, reads hnd and nhd alike. :mod:`m3hal.layouts.stored` does that for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from m3hal._lazy import torch
from m3hal.formats import PLAIN_FORMATS, QSpec, plain_dtype, spec_of

LayoutKind = Literal["hnd", "nhd", "msa_slot", "planar"]
PAGE_MAPS: tuple[LayoutKind, ...] = get_args(LayoutKind)

#: the formats that caches hold, and the page maps of each. mxfp4 is for index keys only.
CACHE_FORMATS: Mapping[str, tuple[LayoutKind, ...]] = {
    **dict.fromkeys((*PLAIN_FORMATS, "fp8_e4m3", "fp8_e4m3_240"), ("hnd", "nhd")),
    **dict.fromkeys(("nvfp4", "mxfp4"), ("msa_slot", "planar")),
}


def is_private(kind: str) -> bool:
    """Whether a page map is one that only its vendor knows: those are called ``vendor:name``."""
    return ":" in kind


#: elements that a page's own lie within: kernels number places in a page in 31 bits, and where pages begin in 64
WITHIN_PAGE = 1 << 31

#: tokens whose value scales lie interleaved in nvfp4 pages, as Blackwell's matrix instructions read them
QUAD = 4


def page_map(format: str, preferred: str) -> str:
    """The preferred page map where a format has it, else the format's first; a private one has every format.

    So the caches of one layer get theirs from the one layout that a plan names for the layer: beside an nvfp4 main
    cache in msa_slot, bf16 index keys lie in hnd.
    """
    kinds = CACHE_FORMATS[format]
    if is_private(preferred):
        return preferred
    return next((kind for kind in kinds if kind == preferred), kinds[0])


@dataclass(frozen=True)
class KVLayout:
    """The page map of a cache.

    kind: of formats without block scales, ``hnd``: a page is [heads, page_size, width]; ``nhd``: [page_size, heads,
        width]. Of nvfp4 and mxfp4, ``msa_slot``: a page is a slot for each head's keys, then one for its values, and a
        slot is the codes of all tokens, then their scales; ``planar``: the codes of all heads' keys, their scales, the
        codes of the values, their scales.
        Key scales are [token, group]; value scales [token // 4, group, token % 4].
        A private one, ``vendor:name``, orders a page's elements as its vendor's kernels alone know.
    width: elements per token and head; ``dim`` for the index cache, ``2 * dim`` with values (keys first).

    Raises ValueError when the format has no such page map, or dim or page_size don't fit it.
    """

    kind: str
    format: str
    page_size: int
    heads: int
    dim: int
    has_values: bool

    def __post_init__(self) -> None:
        spec_of(self.format)  # refuses an unknown name
        kinds = CACHE_FORMATS.get(self.format)
        if kinds is None or (self.format == "mxfp4" and self.has_values):
            raise ValueError(f"no cache holds {self.format}{' values' if kinds else ''}; take fp8_e4m3 or nvfp4")
        if self.kind not in kinds and not is_private(self.kind):
            raise ValueError(f"{self.format} pages are {' or '.join(kinds)}, not {self.kind}")
        if self.spec.group and self.page_size % QUAD:
            raise ValueError(f"{self.format} pages hold a multiple of {QUAD} tokens, not {self.page_size}")
        self.spec.scale_bytes(self.dim)  # refuses a dim that does not fill groups

    @property
    def spec(self) -> QSpec:
        """How a token's vector is stored; an fp8 cache has one scale for all, not one per vector."""
        return spec_of(self.format) if self.format in ("nvfp4", "mxfp4") else QSpec(self.format)

    @property
    def dtype(self) -> torch.dtype:
        """Of the buffer: the plain format's, or uint8."""
        return plain_dtype(self.format) if self.format in PLAIN_FORMATS else torch.uint8

    @property
    def width(self) -> int:
        return self.dim * self.parts

    @property
    def parts(self) -> int:
        """2 with values, else 1."""
        return 2 if self.has_values else 1

    def check_public(self) -> None:
        """Raises ValueError for a private page map, which nobody but its vendor's kernels can read or write."""
        if is_private(self.kind):
            raise ValueError(f"{self.kind} is a private page map; only the kernels of its backend read and write it")

    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page in the buffer."""
        if self.kind == "hnd":
            return (self.heads, self.page_size, self.width)
        if self.kind == "nhd":
            return (self.page_size, self.heads, self.width)
        if is_private(self.kind):
            return (self.page_bytes() // self.dtype.itemsize,)
        if self.kind == "msa_slot":
            return (self.heads * self.parts, self.page_size, self._vector_bytes)
        return (self.page_bytes(),)

    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_size * self.bytes_per_token()

    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer's cache."""
        return self.heads * self.parts * self._vector_bytes

    @property
    def _vector_bytes(self) -> int:
        return self.spec.data_bytes(self.dim) + self.spec.scale_bytes(self.dim)

    def empty(self, pages: int, device: torch.device | str = "cpu") -> PagedCache:
        """A cache of undefined contents."""
        return PagedCache(torch.empty(pages, *self.page_shape(), dtype=self.dtype, device=device), self)


@dataclass(frozen=True)
class PagedCache:
    """A cache buffer and how to read it.

    buf: [pages, *layout.page_shape()], any strides by which a page's elements lie within 2**31 of its first, but a slot
        of msa_slot and a page of planar are contiguous. Bytes are uint8 or labelled with a one-byte float dtype; the
        layout alone says what they mean.
    k_scale, v_scale: fp32 scalars, dequantisation multipliers of fp8 and nvfp4 keys and values; None means 1. Plain
        formats and index caches have none.
    """

    buf: torch.Tensor
    layout: KVLayout
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        plain = self.layout.format in PLAIN_FORMATS
        if plain == (self.buf.element_size() == 1):
            raise ValueError(f"a {self.layout.format} cache can't lie in a {self.buf.dtype} buffer; declare its format")
        if (plain or not self.layout.has_values) and (self.k_scale is not None or self.v_scale is not None):
            what = f"a {self.layout.format} cache" if plain else "an index cache"
            raise ValueError(f"{what} has no global scale; pass none")
        reach = sum((many - 1) * apart for many, apart in zip(self.buf.shape[1:], self.buf.stride()[1:], strict=True))
        if reach >= WITHIN_PAGE:
            raise ValueError(
                f"a page's elements lie up to {reach} elements apart, and kernels number {WITHIN_PAGE} within a page; "
                "allocate the cache with pages outermost"
            )

    @property
    def k(self) -> torch.Tensor:
        """Keys, a view [pages, heads, page_size, dim]."""
        return self._by_head[..., : self.layout.dim]

    @property
    def v(self) -> torch.Tensor:
        """Values, a view [pages, heads, page_size, dim]."""
        if not self.layout.has_values:
            raise ValueError("this cache holds index keys only; it has no values")
        return self._by_head[..., self.layout.dim :]

    @property
    def _by_head(self) -> torch.Tensor:
        if self.layout.format not in PLAIN_FORMATS:
            raise ValueError(f"a {self.layout.format} cache has no plain view; read it with kv_read")
        self.layout.check_public()
        return self.buf if self.layout.kind == "hnd" else self.buf.transpose(1, 2)
