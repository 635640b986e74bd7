"""Quantised vectors, judged byte by byte: how far a number would have to move to be stored as it is.

Kernels that compute what they store differ in the last bits of fp32, and where a number lies between two codes either
is right. So neither equal bytes nor "one code apart" is the question: the second lets truncation pass. A code stands
for an interval of numbers, a scale byte for an interval of its group's largest magnitude, and the error is the distance
of the exact number from its interval. Everything here comes from the formats' description, as in the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from m3hal.layouts import KVLayout, PagedCache
from m3hal_conformance.decoder import (
    GROUP,
    Page,
    Part,
    code_places,
    e2m1,
    e4m3,
    e4m3_240,
    e8m0,
    scale_places,
)

#: of fp32, relative: distances are in units of it
EPS = 2.0**-23
INF = float("inf")
#: what reads a code of each format
_CODES = {"nvfp4": e2m1, "mxfp4": e2m1, "fp8_e4m3": e4m3, "fp8_e4m3_240": e4m3_240}


@dataclass(frozen=True)
class Vectors:
    """What one part of a cache should hold at some slots; tensors only, so that an oracle can carry it.

    codes, scales: int64 [n, H, ...], places of their bytes in the cache. exact: fp64 [n, H, D], what is rounded, over
    the global scale. unit: [n, H, D], the magnitude whose last place counts. numbers: fp64 [codes, 2], what each code
    stands for; tops: [256, 2], the largest magnitudes of a group that each scale byte stands for; factors: [256].
    """

    codes: Tensor
    scales: Tensor
    exact: Tensor
    unit: Tensor
    numbers: Tensor
    tops: Tensor
    factors: Tensor

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Its tensors, as entries of an oracle."""
        return {f"{prefix}.{f.name}": getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, prefix: str, oracle: Mapping[str, Tensor]) -> Vectors:
        """The inverse of :meth:`named`."""
        return cls(*(oracle[f"{prefix}.{f.name}"] for f in fields(cls)))


def places(layout: KVLayout, part: Part, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the codes and the scale bytes of tokens in a cache's contiguous bytes; negative slots are left out."""
    page, slots = Page.of(layout), slots[slots >= 0]
    start = (slots // layout.page_size * layout.page_bytes())[:, None, None]
    offset = slots % layout.page_size
    found = (torch.from_numpy(table(page, part)).transpose(0, 1) for table in (code_places, scale_places))
    codes, scales = (start + table[offset] for table in found)
    return codes, scales


def vectors(
    cache: PagedCache, part: Part, slots: Tensor, exact: Tensor, unit: Tensor, traits: Mapping[str, str]
) -> Vectors:
    """The expectation for exact [T, H, D] at the given slots; traits: what the definition emulates."""
    layout, kept = cache.layout, slots >= 0
    scale = cache.k_scale if part == "k" else cache.v_scale
    ignored = layout.format not in GROUP and traits.get("kv_scale_used") == "no"
    factor = 1.0 if ignored or scale is None else float(scale)
    quantizer, rule = traits.get("nvfp4_quantizer", "division"), traits.get("mx_scale_rule", "own")
    return Vectors(
        *places(layout, part, slots),
        exact=exact[kept].double() / factor,
        unit=unit[kept].double() / factor,
        numbers=_code_intervals(layout.format, layout.format == "nvfp4" and quantizer == "division"),
        tops=_scale_intervals(layout.format, quantizer if layout.format == "nvfp4" else rule),
        factors=_factors(layout.format),
    )


def distance(wanted: Vectors, stored: Tensor, known: Tensor) -> Tensor:
    """fp64 [n, H, D]: of each number from what its code stands for, in last places of fp32; inf where no move helps.

    stored, known: the bytes of a cache, flat, as they are and as the definition stores them. Where a number, or its
    scale, is not finite, its bytes must be the definition's.
    """
    codes, same = (_codes(flat[wanted.codes], len(wanted.numbers)) for flat in (stored, known))
    exact, unit, off = wanted.exact, wanted.unit, torch.zeros_like(wanted.exact)
    groups = wanted.scales.shape[-1]
    if groups:
        group = exact.shape[-1] // groups
        top = exact.reshape(*exact.shape[:-1], groups, group).abs().nan_to_num(nan=0.0, posinf=INF).amax(-1)
        size = unit.reshape(*unit.shape[:-1], groups, group).amax(-1)
        byte, right = (flat[wanted.scales].long() for flat in (stored, known))
        away = torch.where(byte == right, 0.0, _outside(top, size, wanted.tops[byte]))
        off, factor = (t.repeat_interleave(group, -1) for t in (away, wanted.factors[byte]))
        exact, unit = (torch.where(factor == 0, 0.0, t / factor) for t in (exact, unit))
    inside = torch.maximum(off, _outside(exact, unit, wanted.numbers[codes]))
    rigid = torch.where(codes == same, off, INF)
    return torch.where(exact.isfinite(), inside, rigid).nan_to_num(nan=INF, posinf=INF)


def written(oracle: Mapping[str, Tensor], prefix: str) -> Tensor:
    """Every place that the slots name, flat."""
    return torch.cat([oracle[f"{prefix}.codes"].flatten(), oracle[f"{prefix}.scales"].flatten()])


def _codes(data: Tensor, count: int) -> Tensor:
    """int64, one code for each number."""
    whole = data.long()
    return torch.stack([whole & 15, whole >> 4], -1).flatten(-2) if count == 16 else whole


def _outside(numbers: Tensor, unit: Tensor, interval: Tensor) -> Tensor:
    """How far numbers lie outside [low, high] = interval[..., 0:2], in last places of fp32 at ``unit``."""
    away = torch.maximum(interval[..., 0] - numbers, numbers - interval[..., 1])
    size = torch.maximum(unit, numbers.abs()) * EPS
    return torch.where(away <= 0, 0.0, away / size)


@cache
def _code_intervals(format: str, positive_zero: bool) -> Tensor:
    """fp64 [codes, 2]: the numbers that are rounded to each code; none (inf, -inf) for codes that nothing gives.

    positive_zero: zero is stored as +0 whatever its sign, as in nvfp4 by definition.
    """
    read, count = _CODES[format], 16 if format in GROUP else 256
    half = count // 2
    magnitude = [m for m in (read(code) for code in range(half)) if np.isfinite(m)]
    middle = [(a + b) / 2 for a, b in pairwise(magnitude)]
    edges = [*zip([0.0, *middle], [*middle, INF], strict=True)]
    found = torch.tensor([INF, -INF], dtype=torch.float64).repeat(count, 1)
    for code, (low, high) in enumerate(edges):
        found[code] = torch.tensor([low, high])
        found[code + half] = torch.tensor([-high, -low])
    if positive_zero and format == "nvfp4":
        found[0, 0], found[half] = -edges[0][1], torch.tensor([INF, -INF])
    return found


@cache
def _factors(format: str) -> Tensor:
    """fp64 [256]: the number of each scale byte."""
    read = e4m3 if format == "nvfp4" else e8m0
    return torch.tensor([read(byte) for byte in range(256)], dtype=torch.float64)


@cache
def _scale_intervals(format: str, rule: str) -> Tensor:
    """fp64 [256, 2]: the largest magnitudes of a group that each scale byte stands for.

    nvfp4: a sixth of it, rounded to E4M3; ``division`` keeps it from 2**-9 on. mxfp4: see ``m3hal.formats.e8m0``.
    """
    found = torch.tensor([INF, -INF], dtype=torch.float64).repeat(256, 1)
    if format not in GROUP:
        return found
    if format == "nvfp4":
        found[:127] = 6 * _code_intervals("fp8_e4m3", False)[:127]
        if rule == "division":
            found[1, 0], found[0] = 0.0, torch.tensor([INF, -INF])
        return found
    low = {"floor": 4.0, "own": 3.5, "even": 3.5, "ceil": 3.0}[rule]  # of 6, the largest number, 4 is the power of two
    for byte in range(255):
        found[byte] = torch.tensor([low * e8m0(byte), 2 * low * e8m0(byte)])
    found[0, 0], found[254, 1] = 0.0, INF
    return found
