"""Reads the bytes of every public cache layout, one number at a time, with arithmetic on offsets and bits alone.

A kernel that writes and reads with the same wrong page map agrees with itself. This decoder shares nothing with
``m3hal.formats`` and ``m3hal.layouts``: it is numpy on a flat array of bytes, written from the layouts' description;
speed is no aim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Page:
    """A page map in the words of :class:`m3hal.layouts.KVLayout`."""

    kind: str
    format: str
    page_size: int
    heads: int
    dim: int
    has_values: bool

    @classmethod
    def of(cls, layout: Any) -> Page:
        """The same six facts of a layout object."""
        return cls(*(getattr(layout, name) for name in cls.__dataclass_fields__))


def decode_slot(
    raw: Bytes,
    page: Page,
    slot: int,
    part: Literal["k", "v"],
    global_scale: float = 1.0,
    page_stride: int | None = None,
) -> Numbers:
    """fp64 [heads, dim]: the keys or the values of one token, exactly as stored.

    raw: the bytes of the cache. page_stride: bytes from one page to the next, for block-outer memory; None: a page's
        own length. global_scale: the dequantisation multiplier of the part.
    """
    index, token = divmod(slot, page.page_size)
    stride = page_bytes(page) if page_stride is None else page_stride
    mine = raw[index * stride : index * stride + page_bytes(page)]
    read = _blocked if page.format in ("nvfp4", "mxfp4") else _unblocked
    return np.array(
        [[read(mine, page, head, token, d, part) for d in range(page.dim)] for head in range(page.heads)]
    ) * (global_scale)


def page_bytes(page: Page) -> int:
    """Length of a page in bytes."""
    vector = page.dim * _BITS[page.format] // 8
    if page.format in _GROUP:
        vector += page.dim // _GROUP[page.format]
    return page.page_size * page.heads * (2 if page.has_values else 1) * vector


_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "fp8_e4m3": 8, "fp8_e4m3_240": 8, "nvfp4": 4, "mxfp4": 4}
_GROUP = {"nvfp4": 16, "mxfp4": 32}


def _unblocked(raw: Bytes, page: Page, head: int, token: int, d: int, part: str) -> float:
    """hnd and nhd: one element, keys before values in a token's row."""
    row = head * page.page_size + token if page.kind == "hnd" else token * page.heads + head
    if page.kind not in ("hnd", "nhd"):
        raise ValueError(f"{page.format} has no public page map {page.kind}")
    column = d + (page.dim if part == "v" else 0)
    element = row * page.dim * (2 if page.has_values else 1) + column
    size = _BITS[page.format] // 8
    word = int.from_bytes(raw[element * size : (element + 1) * size].tobytes(), "little")
    if page.format == "fp8_e4m3":
        return e4m3(word)
    if page.format == "fp8_e4m3_240":
        return e4m3_240(word)
    return _ieee(word, page.format)


def _blocked(raw: Bytes, page: Page, head: int, token: int, d: int, part: str) -> float:
    """msa_slot and planar: a four-bit code and the byte that scales its group."""
    codes = page.page_size * page.dim // 2  # bytes of one head
    groups = page.dim // _GROUP[page.format]
    scales = page.page_size * groups
    value = part == "v"
    if page.kind == "msa_slot":
        slot = head * (2 if page.has_values else 1) + value
        code_base = slot * (codes + scales)
        scale_base = code_base + codes
    elif page.kind == "planar":
        side = page.heads * (codes + scales) * value
        code_base = side + head * codes
        scale_base = side + page.heads * codes + head * scales
    else:
        raise ValueError(f"{page.format} has no public page map {page.kind}")
    group = d // _GROUP[page.format]
    place = (token // 4) * 4 * groups + group * 4 + token % 4 if value else token * groups + group
    byte = int(raw[code_base + token * (page.dim // 2) + d // 2])
    scale = int(raw[scale_base + place])
    return e2m1(byte >> 4 if d % 2 else byte & 15) * (e4m3(scale) if page.format == "nvfp4" else e8m0(scale))


def e2m1(code: int) -> float:
    """Sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def e4m3(code: int) -> float:
    """OCP's: only 0x7F and 0xFF are NaN."""
    return math.nan if code & 0x7F == 0x7F else _e4m3(code)


def e4m3_240(code: int) -> float:
    """Gaudi 2's: the top exponent holds infinity and NaN."""
    if code & 0x78 == 0x78:
        return math.nan if code & 7 else math.copysign(math.inf, -1 if code & 0x80 else 1)
    return _e4m3(code)


def e8m0(code: int) -> float:
    """A power of two; 255 is NaN."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


def _e4m3(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 0x80 else magnitude


def _ieee(word: int, format: str) -> float:
    if format == "float64":
        return float(np.uint64(word).view(np.float64))
    return float(np.uint32(word << 16 if format == "bfloat16" else word).view(np.float32))
