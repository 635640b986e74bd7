"""What a quantised tensor is, and the formats that need no scale."""

from __future__ import annotations

from dataclasses import dataclass

from m3hal._lazy import torch

#: formats whose elements are torch dtypes of the same name; float64 is what oracles compute and store in
PLAIN_FORMATS = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class QSpec:
    """How numbers are stored.

    format: a name of :mod:`m3hal.formats`. group: neighbours of the last axis that share a scale; 0: no scales.
    """

    format: str
    group: int = 0


@dataclass(frozen=True)
class QTensor:
    """Numbers in a storage format: ``data * scale * global_scale``.

    data: codes. scale: one per group. global_scale: fp32 scalar. Both are dequantisation multipliers, always; None
    where the format has none.
    """

    data: torch.Tensor
    spec: QSpec
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None


def spec_of(format: str) -> QSpec:
    """The storage of a format. Raises ValueError for an unknown name, listing the known ones."""
    _require_plain(format)
    return QSpec(format)


def plain_dtype(format: str) -> torch.dtype:
    """The torch dtype of a plain format. Raises ValueError for any other name, listing the known ones."""
    _require_plain(format)
    dtype: torch.dtype = getattr(torch, format)
    return dtype


def _require_plain(format: str) -> None:
    if format not in PLAIN_FORMATS:
        raise ValueError(f"unknown format {format!r}; m3hal knows {', '.join(PLAIN_FORMATS)}")
