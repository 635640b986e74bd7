"""How suites are written: one call per question, in every format and layout it is asked in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from m3hal_conformance.case import DTYPES, Case, Inputs, Make, Rng, Site, dtype_of, make_site
from m3hal_conformance.checks import UNIVERSAL

#: for cases whose inputs are large: what needs two calls only
LIGHT = ("oracle", "guards", "inputs", "written", "convention")
#: rows that kernels handle apart: one, tile sizes and their neighbours
TOKENS = (1, 7, 16, 17, 64, 65, 129)


def ask(
    operator: str,
    name: str,
    make: Callable[[Rng, Site], Inputs],
    *,
    kind: str,
    checks: Sequence[str] = UNIVERSAL,
    also: Sequence[str] = (),
    dtypes: Sequence[str] = DTYPES,
    layouts: Sequence[str] = ("hnd",),
    input_class: str = "plain",
    bugs: Sequence[str] = (),
    quick: bool = False,
    golden: Callable[[Inputs], Mapping[str, Tensor]] | None = None,
    lazy: Sequence[str] = (),
    sizes: str = "cpu",
    **site: Any,
) -> list[Case]:
    """The same question in each format and layout. ``also``: checks besides ``checks``."""
    return [
        Case(
            id=f"{operator}/{name}/{dtype}" + (f"-{layout}" if layout != "hnd" else ""),
            operator=operator,
            site=make_site(kind, dtype, **_formats(dtype, site)),
            make=make,
            checks=(*checks, *also),
            input_class=input_class,
            layout=layout,
            bugs=tuple(bugs),
            golden=golden,
            quick=quick,
            lazy=tuple(lazy),
            sizes=sizes,
        )
        for dtype in dtypes
        for layout in layouts
    ]


def activations(numbers: Callable[[Rng], Tensor]) -> Make:
    """An input ``x`` of the given numbers in the site's format, in the strides that they have."""
    return lambda rng, site: {"x": numbers(rng).to(dtype_of(site))}


def _formats(dtype: str, site: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value(dtype) if callable(value) else value for name, value in site.items()}


def spikes(rows: int, width: int, step: int, rng: Rng) -> Tensor:
    """Noise whose row r has almost all its energy in chunk r of ``step`` columns: a chunk left out is a row lost."""
    numbers = 0.02 * rng.normal(rows, width)
    chunks = -(-width // step)
    for row in range(rows):
        start = (row % chunks) * step
        numbers[row, start : start + step] += rng.normal(min(step, width - start)).sign() * 2
    return numbers


def in_wide_row(tensor: Tensor, before: int = 3, after: int = 5) -> Tensor:
    """The same numbers as a slice of wider rows, as q, k and v lie in a fused projection; not aligned."""
    wide = torch.full((*tensor.shape[:-1], before + tensor.shape[-1] + after), float("nan"), dtype=tensor.dtype)
    wide[..., before : before + tensor.shape[-1]] = tensor
    return wide[..., before : before + tensor.shape[-1]]


def every_other(tensor: Tensor, axis: int) -> Tensor:
    """The same numbers with a doubled stride along an axis."""
    wide = torch.stack([tensor, torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 77)], axis + 1)
    return wide.select(axis + 1, 0)


def column_major(tensor: Tensor) -> Tensor:
    """The same [.., n, m] numbers, stored with the last two axes exchanged."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
