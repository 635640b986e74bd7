"""Caches of every format and page map, and numbers at which rounding is decided."""

from __future__ import annotations

import torch
from attention_cases import DEVICE

from m3hal.layouts import KVLayout, PagedCache

#: (format, page map) of the caches that kernels write; mxfp4 holds index keys only
MAPS = [(format, kind) for format in ("float32", "bfloat16", "fp8_e4m3") for kind in ("hnd", "nhd")]
MAPS += [(format, kind) for format in ("nvfp4", "mxfp4") for kind in ("msa_slot", "planar")]
#: global scales that are no power of two
SCALES = (0.37, 1.9)


def empty(format: str, kind: str, *, heads: int, dim: int, values: bool, page_size: int = 16, pages: int = 5):
    """Every other page of a buffer of stale bytes, with global scales where the format has them."""
    layout = KVLayout(kind, format, page_size, heads, dim, values)
    buffer = torch.empty(pages, 2, *layout.page_shape(), dtype=layout.dtype, device=DEVICE)
    buffer.view(torch.uint8).fill_(0x5A)
    scaled = values and format in ("fp8_e4m3", "nvfp4")
    scales = (torch.tensor(scale, device=DEVICE) for scale in SCALES) if scaled else ()
    return PagedCache(buffer[:, 1], layout, *scales)


def raw(cache: PagedCache) -> torch.Tensor:
    """All bytes of the buffer, those between the pages too."""
    whole = torch.as_strided(cache.buf, (cache.buf.untyped_storage().size() // cache.buf.element_size(),), (1,), 0)
    return whole.view(torch.uint8).cpu()


def every_bf16() -> torch.Tensor:
    """fp32: all bf16 values, and the fp32 numbers beside each, where midpoints are decided; NaN, infinity, zeros."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).float()
    beside = (x.view(torch.int32) + torch.tensor([[-1], [0], [1]], dtype=torch.int32)).view(torch.float32)
    return beside.flatten().to(DEVICE)
