"""FP8: E4M3 codes with one fp32 scale per row, or with a global one only.

Per row (``QSpec.group`` ROW) it is what dynamic activations (a row is a token) and per-channel weights (a row is an
output channel) use; with a global scale only (group 0), KV caches and activations with a scale of the checkpoint.
Source: vLLM ``scaled_fp8_quant``; Habana's per-channel FP8, whose maximum is 240.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.formats import e4m3
from m3hal.formats._codes import divided, wide
from m3hal.formats.plain import ROW, QSpec, QTensor


def quantize_rows(x: torch.Tensor, maximum: e4m3.Maximum = e4m3.OCP) -> QTensor:
    """Codes [..., n] and fp32 scales [..., 1], each row's largest magnitude at the format's maximum.

    A row of zeros gets scale 1. A NaN or an infinity makes its own row NaN.
    """
    x = wide(x)
    scale = divided(x.abs().amax(-1, keepdim=True), maximum).float()
    scale = scale.masked_fill(scale == 0, 1.0)
    return QTensor(e4m3.encode(x / scale, maximum), QSpec(name_of(maximum), ROW), scale)


def quantize_global(
    x: torch.Tensor, global_scale: torch.Tensor | None = None, maximum: e4m3.Maximum = e4m3.OCP
) -> QTensor:
    """Codes [..., n] of ``x / global_scale``, saturating; None means 1."""
    x = wide(x)
    codes = e4m3.encode(x if global_scale is None else x / global_scale, maximum)
    return QTensor(codes, QSpec(name_of(maximum)), global_scale=global_scale)


def decode(q: QTensor) -> torch.Tensor:
    """fp32 numbers of the codes alone."""
    return e4m3.decode(q.data, maximum_of(q.spec.format))


def name_of(maximum: e4m3.Maximum) -> str:
    """The format's name in :data:`m3hal.formats.FORMATS`."""
    return "fp8_e4m3" if maximum == e4m3.OCP else "fp8_e4m3_240"


def maximum_of(format: str) -> e4m3.Maximum:
    """The inverse of :func:`name_of`."""
    return e4m3.GAUDI2 if format == "fp8_e4m3_240" else e4m3.OCP
