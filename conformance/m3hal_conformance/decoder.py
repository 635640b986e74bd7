"""Reads the bytes of every public cache layout, with arithmetic on offsets and bits alone.

A kernel that writes and reads with the same wrong page map agrees with itself. This decoder shares nothing with
``m3hal.formats`` and ``m3hal.layouts``: it is numpy on a flat array of bytes, written from the layouts' description.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.float64]
Places = NDArray[np.int64]
Part = Literal["k", "v"]


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
    part: Part,
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
    numbers = numbers_of(mine[code_places(page, part)[:, token]], page.format)
    if page.format in GROUP:
        scales = _table(SCALE[page.format])[mine[scale_places(page, part)[:, token]]]
        numbers = numbers * np.repeat(scales, GROUP[page.format], axis=-1)
    return numbers * global_scale


def numbers_of(codes: Bytes, format: str) -> Numbers:
    """fp64 [..., dim] of the bytes [..., n] of a vector's codes, without any scale."""
    if format in GROUP:
        halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
        return _table("e2m1")[halves]
    if format in ("fp8_e4m3", "fp8_e4m3_240"):
        return _table("e4m3" if format == "fp8_e4m3" else "e4m3_240")[codes]
    return _ieee(np.ascontiguousarray(codes), format)


@cache
def code_places(page: Page, part: Part) -> Places:
    """int64 [heads, page_size, n]: where in a page the bytes of each vector's codes lie."""
    head, token = np.arange(page.heads)[:, None, None], np.arange(page.page_size)[:, None]
    size = page.dim * _BITS[page.format] // 8
    byte = np.arange(size)
    if page.kind in ("hnd", "nhd") and page.format not in GROUP:
        row = head * page.page_size + token if page.kind == "hnd" else token * page.heads + head
        places: Places = (row * _parts(page) + (part == "v")) * size + byte
        return places  # keys before values in a token's row
    places = _codes_from(page, part) + token * size + byte
    return places


@cache
def scale_places(page: Page, part: Part) -> Places:
    """int64 [heads, page_size, groups]: where the scale bytes lie; [heads, page_size, 0] without block scales."""
    if page.format not in GROUP:
        return np.empty((page.heads, page.page_size, 0), dtype=np.int64)
    token, groups = np.arange(page.page_size)[:, None], page.dim // GROUP[page.format]
    group = np.arange(groups)
    place = (token // 4) * 4 * groups + group * 4 + token % 4 if part == "v" else token * groups + group
    return _scales_from(page, part) + place


def page_bytes(page: Page) -> int:
    """Length of a page in bytes."""
    vector = page.dim * _BITS[page.format] // 8
    if page.format in GROUP:
        vector += page.dim // GROUP[page.format]
    return page.page_size * page.heads * _parts(page) * vector


#: elements that share a scale byte, and what the byte is
GROUP = {"nvfp4": 16, "mxfp4": 32}
SCALE = {"nvfp4": "e4m3", "mxfp4": "e8m0"}
_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "fp8_e4m3": 8, "fp8_e4m3_240": 8, "nvfp4": 4, "mxfp4": 4}


def _parts(page: Page) -> int:
    return 2 if page.has_values else 1


def _sizes(page: Page) -> tuple[int, int]:
    """Bytes of the codes, and of the scales, of one head's keys or values in a page."""
    return page.page_size * page.dim // 2, page.page_size * (page.dim // GROUP[page.format])


def _codes_from(page: Page, part: Part) -> Places:
    """int64 [heads, 1, 1]: where the codes of each head begin. msa_slot: codes, then scales, of a head's keys, then
    those of its values. planar: the codes of all heads' keys, their scales, the codes of the values, their scales."""
    head, (codes, scales) = np.arange(page.heads)[:, None, None], _sizes(page)
    if page.kind == "msa_slot":
        return (head * _parts(page) + (part == "v")) * (codes + scales)
    if page.kind == "planar":
        return page.heads * (codes + scales) * (part == "v") + head * codes
    raise ValueError(f"{page.format} has no public page map {page.kind}")


def _scales_from(page: Page, part: Part) -> Places:
    head, (codes, scales) = np.arange(page.heads)[:, None, None], _sizes(page)
    if page.kind == "msa_slot":
        return _codes_from(page, part) + codes
    return page.heads * (codes + scales) * (part == "v") + page.heads * codes + head * scales


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


def _ieee(codes: Bytes, format: str) -> Numbers:
    if format == "bfloat16":  # the upper half of an fp32 number
        return (codes.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return codes.view("<f4" if format == "float32" else "<f8").astype(np.float64)


@cache
def _table(name: str) -> Numbers:
    """The number of every code."""
    read = {"e2m1": e2m1, "e4m3": e4m3, "e4m3_240": e4m3_240, "e8m0": e8m0}[name]
    return np.array([read(code) for code in range(16 if name == "e2m1" else 256)])
