"""A paged KV cache: ``(buffer, layout, scales)``.

A layout says how a page's bytes hold keys and values; a block-outer cache is no layout of its own but a stride of the
buffer. ``PagedCache.k`` and ``.v`` give the plain formats (fp32, bf16) as strided views in one logical order, so a
definition, and a kernel that takes strides, reads hnd and nhd alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from m3hal._lazy import torch
from m3hal.formats import PLAIN_FORMATS, plain_dtype

LayoutKind = Literal["hnd", "nhd"]


@dataclass(frozen=True)
class KVLayout:
    """The page map of a cache.

    kind: ``hnd``: a page is [heads, page_size, width]; ``nhd``: [page_size, heads, width].
    width: elements per token and head; ``dim`` for the index cache, ``2 * dim`` with values (keys first).
    """

    kind: LayoutKind
    format: str
    page_size: int
    heads: int
    dim: int
    has_values: bool

    @property
    def width(self) -> int:
        return self.dim * (2 if self.has_values else 1)

    def page_shape(self) -> tuple[int, int, int]:
        """Shape of one page in the buffer."""
        if self.kind == "hnd":
            return (self.heads, self.page_size, self.width)
        return (self.page_size, self.heads, self.width)

    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer's cache."""
        return self.heads * self.width * plain_dtype(self.format).itemsize

    def empty(self, pages: int, device: torch.device | str = "cpu") -> PagedCache:
        """A cache of undefined contents."""
        return PagedCache(torch.empty(pages, *self.page_shape(), dtype=plain_dtype(self.format), device=device), self)


@dataclass(frozen=True)
class PagedCache:
    """A cache buffer and how to read it.

    buf: [pages, *layout.page_shape()], any strides. k_scale, v_scale: fp32 scalars, dequantisation multipliers; None
    for plain formats.
    """

    buf: torch.Tensor
    layout: KVLayout
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

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
        return self.buf if self.layout.kind == "hnd" else self.buf.transpose(1, 2)
