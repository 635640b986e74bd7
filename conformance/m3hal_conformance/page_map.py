"""Private page maps: caches that only their vendor's kernels can read and write.

Such a cache is written by the vendor's ``kv_write``, token by token, and what a kernel left in it is read by the
vendor's ``unpack``: a third piece of code, so that an error which a ``kv_write`` and a ``kv_read`` share is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from m3hal.dispatch import Bound
from m3hal.formats import PLAIN_FORMATS
from m3hal.layouts import PagedCache
from m3hal_conformance.trial import CheckFailed, Unsupported


@dataclass(frozen=True)
class PageMap:
    """One private map. writer: its backend's kv_write, bound at the site of the case."""

    kind: str
    writer: Bound
    device: torch.device

    def packed(self, inputs: Mapping[str, Any], lazy: tuple[str, ...] = ()) -> dict[str, Any]:
        """Inputs whose caches lie in private pages. Raises Unsupported for those that can't be written anew."""
        done: dict[int, PagedCache] = {}

        def pack(cache: PagedCache) -> PagedCache:
            if id(cache.buf) not in done:
                done[id(cache.buf)] = self._packed(cache)
            return done[id(cache.buf)]

        large = [name for name in lazy if isinstance(inputs[name], PagedCache)]
        if large:
            raise Unsupported(f"its page map {self.kind} is private, and {large[0]} is too large to be written in it")
        return {name: pack(value) if isinstance(value, PagedCache) else value for name, value in inputs.items()}

    def _packed(self, cache: PagedCache) -> PagedCache:
        layout = cache.layout
        if layout.format not in PLAIN_FORMATS:
            raise Unsupported(f"its page map {self.kind} is private; {layout.format} can't be written in it losslessly")
        private = replace(layout, kind=self.kind)
        pages, step = len(cache.buf), max(cache.buf.stride(0), private.page_shape()[0])
        buf = torch.zeros(pages, step, dtype=cache.buf.dtype, device=self.device)[:, : private.page_shape()[0]]
        written = PagedCache(buf, private)
        slots = torch.arange(pages * layout.page_size, device=self.device)
        parts = [_rows(cache.k), _rows(cache.v) if layout.has_values else None]
        k, v = (part if part is None else part.to(self.device) for part in parts)
        options: dict[str, Any] = {}
        if self.writer.workspace_bytes:
            options["workspace"] = torch.empty(self.writer.workspace_bytes, dtype=torch.uint8, device=self.device)
        self.writer.run(written, k, v, slots, **options)
        return replace(written, buf=written.buf.cpu())

    def unpacked(self, cache: PagedCache) -> Tensor:
        """The buffer of the same tokens in hnd pages, on the CPU."""
        assert self.writer.unpack is not None, "the runner refuses private maps without one"
        found = self.writer.unpack(cache)
        public = replace(cache.layout, kind="hnd")
        shape = (len(cache.buf), *public.page_shape())
        if not isinstance(found, PagedCache) or found.layout != public or found.buf.shape != shape:
            raise CheckFailed(f"unpack of kv_write must give a cache {shape} of {public}; it gave {found!r}"[:600])
        return found.buf.detach().to("cpu", copy=True)


def _rows(part: Tensor) -> Tensor:
    """[pages, heads, page_size, dim] as the rows of kv_write, [pages * page_size, heads, dim]."""
    return part.transpose(1, 2).flatten(0, 1)
