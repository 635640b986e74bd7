"""MXFP8: blocks of 32 E4M3 codes that share an E8M0 scale.

Source: OCP Microscaling Formats 1.0; the scale rule ``ceil`` is vLLM's ``mxfp8_utils``.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.formats import e4m3, e8m0
from m3hal.formats._codes import grouped, wide
from m3hal.formats.plain import QSpec, QTensor

GROUP = 32


def quantize(x: torch.Tensor, rule: e8m0.Rule = "ceil") -> QTensor:
    """Codes [..., n] and scale bytes [..., n / 32]. A NaN makes its own block NaN; an infinity saturates."""
    blocks = grouped(wide(x), GROUP)
    scale = e8m0.from_amax(blocks.abs().amax(-1), float(e4m3.OCP), rule)
    codes = e4m3.encode(blocks / e8m0.decode(scale)[..., None])
    return QTensor(codes.flatten(-2), QSpec("mxfp8", GROUP), scale)
