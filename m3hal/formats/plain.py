"""What a quantised tensor is, which formats there are, and those that need no scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from m3hal._lazy import torch

#: formats whose elements are torch dtypes of the same name; float64 is what oracles compute and store in
PLAIN_FORMATS = ("float32", "bfloat16", "float64")

#: a QSpec's group when the whole last axis shares one scale: a token of activations, an output channel of weights
ROW = -1


@dataclass(frozen=True)
class Format:
    """A storage format, as data.

    bits: of one element. group: elements of the last axis that usually share a scale; 0: none does. scale_bits: of one
    scale.
    """

    bits: int
    group: int = 0
    scale_bits: int = 0


#: every storage format. Codes and scales are bytes, except fp32 scales and the plain formats' elements.
FORMATS: Mapping[str, Format] = {
    "float32": Format(32),
    "bfloat16": Format(16),
    "float64": Format(64),
    "fp8_e4m3": Format(8, ROW, 32),
    "fp8_e4m3_240": Format(8, ROW, 32),  # Gaudi 2's E4M3: the top binade holds inf and NaN
    "mxfp8": Format(8, 32, 8),
    "mxfp4": Format(4, 32, 8),
    "nvfp4": Format(4, 16, 8),
}


@dataclass(frozen=True)
class QSpec:
    """How numbers are stored.

    format: a name of :data:`FORMATS`. group: neighbours of the last axis that share a scale; 0: no scales, at most a
    global one; ROW: the whole axis.
    """

    format: str
    group: int = 0

    def data_bytes(self, elements: int) -> int:
        """Bytes of the codes of one row. Raises ValueError when they don't fill whole bytes."""
        return _whole_bytes(elements * FORMATS[self.format].bits, f"{elements} elements of {self.format}")

    def scale_bytes(self, elements: int) -> int:
        """Bytes of the scales of one row. Raises ValueError when the elements don't fill whole groups."""
        if self.group == 0:
            return 0
        group = elements if self.group == ROW else self.group
        if elements % group:
            raise ValueError(f"{self.format} shares a scale among {group} neighbours; {elements} don't fill groups")
        return elements // group * FORMATS[self.format].scale_bits // 8


@dataclass(frozen=True)
class QTensor:
    """Numbers in a storage format: ``data * scale * global_scale``.

    data: plain formats: the numbers. Others: uint8 codes (or a one-byte float dtype of the same bytes), with four-bit
        codes two to a byte, the even element in the low half.
    scale: one per group, shaped like data with the groups as last axis: E8M0 bytes (mxfp8, mxfp4), E4M3 bytes (nvfp4),
        fp32 (fp8). global_scale: fp32, a scalar or as many axes as the numbers, against which it broadcasts.

    Scales are dequantisation multipliers, always; None where the format has none.
    """

    data: torch.Tensor
    spec: QSpec
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None

    def __getitem__(self, index: Any) -> QTensor:
        """Entries of the leading axis, such as one expert of all: views, or copies for a tensor of indices."""
        scale = None if self.scale is None else self.scale[index]
        own = self.global_scale is not None and self.global_scale.ndim == self.data.ndim
        global_scale = self.global_scale[index] if own and self.global_scale is not None else self.global_scale
        return QTensor(self.data[index], self.spec, scale, global_scale)


def spec_of(format: str) -> QSpec:
    """The usual storage of a format. Raises ValueError for an unknown name, listing the known ones."""
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; m3hal knows {', '.join(FORMATS)}")
    return QSpec(format, FORMATS[format].group)


def plain_dtype(format: str) -> torch.dtype:
    """The torch dtype of a plain format. Raises ValueError for any other name."""
    if format not in PLAIN_FORMATS:
        spec_of(format)  # an unknown name gets its own sentence
        raise ValueError(f"{format} is no plain format; plain formats are {', '.join(PLAIN_FORMATS)}")
    dtype: torch.dtype = getattr(torch, format)
    return dtype


def _whole_bytes(bits: int, what: str) -> int:
    if bits % 8:
        raise ValueError(f"{what} don't fill whole bytes; take an even number")
    return bits // 8
