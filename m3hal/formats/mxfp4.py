"""MXFP4: blocks of 32 E2M1 codes that share an E8M0 scale.

Source: OCP Microscaling Formats 1.0; the scale rule ``even`` is that of vLLM and AITER.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.formats import e2m1, e8m0
from m3hal.formats._codes import grouped, wide
from m3hal.formats.plain import QSpec, QTensor

GROUP = 32


def quantize(x: torch.Tensor, rule: e8m0.Rule = "even") -> QTensor:
    """Packed codes [..., n / 2] and scale bytes [..., n / 32]. A NaN makes its own block NaN."""
    blocks = grouped(wide(x), GROUP)
    scale = e8m0.from_amax(blocks.abs().amax(-1), e2m1.MAX, rule)
    codes = e2m1.encode(blocks / e8m0.decode(scale)[..., None])
    return QTensor(e2m1.pack(codes.flatten(-2)), QSpec("mxfp4", GROUP), scale)
