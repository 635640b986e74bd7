"""Reads the bytes of a public cache layout with arithmetic on offsets alone, so that paired errors can't hide.

A kernel that writes and reads with the same wrong page map agrees with itself; this decoder shares no code with
``m3hal.layouts``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3hal.layouts import KVLayout


def decode_cache(buffer: Tensor, layout: KVLayout, slot: int, which: str) -> Tensor:
    """fp32 [heads, dim]: the keys ("k") or values ("v") of one slot of a contiguous buffer."""
    raw = buffer.contiguous().view(torch.uint8).flatten()
    size = {"float32": 4, "bfloat16": 2}[layout.format]
    page, offset = divmod(slot, layout.page_size)
    width = layout.dim * 2 if layout.has_values else layout.dim
    skip = layout.dim if which == "v" else 0
    heads = []
    for head in range(layout.heads):
        if layout.kind == "hnd":
            element = ((page * layout.heads + head) * layout.page_size + offset) * width + skip
        else:
            element = ((page * layout.page_size + offset) * layout.heads + head) * width + skip
        heads.append(_numbers(raw[element * size : (element + layout.dim) * size], size))
    return torch.stack(heads)


def _numbers(raw: Tensor, size: int) -> Tensor:
    """Little-endian IEEE fp32; bf16 is its upper half."""
    code = raw.view(-1, size).to(torch.int64)
    weight = 256 ** torch.arange(size)
    word = (code * weight).sum(-1) << (8 * (4 - size))
    word = torch.where(word >= 1 << 31, word - (1 << 32), word)
    return word.to(torch.int32).view(torch.float32)
