"""NVFP4: blocks of 16 E2M1 codes that share an E4M3 scale, and one fp32 scale over all.

The definition is the quantiser of vLLM's fused MiniMax-M3 cache insertion; :data:`Quantizer` lists the others.
Source: vLLM ``fused_minimax_m3_qknorm_rope_kv_insert``, ``reshape_and_cache_nvfp4``, DeepGEMM's MegaMoE dispatch.
"""

from __future__ import annotations

from typing import Literal

from m3hal._lazy import torch
from m3hal.formats import e2m1, e4m3
from m3hal.formats._codes import divided, grouped, wide
from m3hal.formats.plain import QSpec, QTensor

GROUP = 16

#: how codes are found. ``division``: by a correctly rounded division, the scale at least 2**-9, zero always +0.
#: ``reciprocal``: by multiplication with a reciprocal, a scale of zero possible. ``token_global``: ``division`` with a
#: global scale of its own for each row.
Quantizer = Literal["division", "reciprocal", "token_global"]


def quantize(x: torch.Tensor, global_scale: torch.Tensor | None = None, quantizer: Quantizer = "division") -> QTensor:
    """Packed codes [..., n / 2], scale bytes [..., n / 16], and the global scale.

    global_scale: fp32, a dequantisation multiplier; None means 1. Not with ``token_global``, which makes its own,
        [..., 1].

    An infinity saturates. So does a NaN, to +6 times its block's scale: the format has no NaN.
    """
    x = wide(x)
    if quantizer == "reciprocal":
        return _by_reciprocal(x, global_scale)
    if quantizer == "token_global":
        if global_scale is not None:
            raise ValueError("token_global makes its own global scales; pass none")
        global_scale = divided(x.abs().amax(-1, keepdim=True).clamp(min=1e-12), e4m3.OCP * e2m1.MAX).float()
    scaled = x if global_scale is None else x * (1.0 / global_scale)
    blocks = grouped(scaled, GROUP)
    scale = e4m3.encode(divided(_amax(blocks).clamp(min=1e-12), e2m1.MAX).clamp(e4m3.TINY, e4m3.OCP))
    codes = e2m1.encode(blocks / e4m3.decode(scale)[..., None])
    return _tensor(codes.masked_fill(codes == 8, 0), scale, global_scale)


def global_scale_of(x: torch.Tensor, *, own: int = 0) -> torch.Tensor:
    """The fp32 global scale that puts the largest magnitude of ``x`` at the format's end (448 * 6); 1 for zeros.

    own: leading axes along which every entry gets a scale of its own, of as many axes as x; 0: one scalar for all.
    """
    amax = x.abs().amax(tuple(range(own, x.ndim)), keepdim=own > 0).float()
    return torch.where(amax == 0, 1.0, divided(amax, e4m3.OCP * e2m1.MAX))


def _by_reciprocal(x: torch.Tensor, global_scale: torch.Tensor | None) -> QTensor:
    """Every division replaced by a product with a reciprocal, as on the hardware; -0 stays."""
    inverse = 1.0 if global_scale is None else 1.0 / global_scale
    blocks = grouped(x, GROUP)
    scale = e4m3.encode(inverse * (_amax(blocks) * (1.0 / e2m1.MAX)))
    step = e4m3.decode(scale) * (1.0 / inverse)
    factor = torch.where(step == 0, 0.0, 1.0 / step)
    return _tensor(e2m1.encode(blocks * factor[..., None]), scale, global_scale)


def _amax(blocks: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block; NaN counts as 0, as in a kernel's fmaxf."""
    return blocks.abs().masked_fill(blocks.isnan(), 0.0).amax(-1)


def _tensor(codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None) -> QTensor:
    return QTensor(e2m1.pack(codes.flatten(-2)), QSpec("nvfp4", GROUP), scale, global_scale)


def as_multiplier(stored: torch.Tensor, *, is_divisor: bool) -> torch.Tensor:
    """A checkpoint's global scale, [1] or (), as the fp32 scalar that dequantisation multiplies by.

    is_divisor: compressed-tensors stores the reciprocal (2688 / amax), modelopt the multiplier itself.
    Raises ValueError for a scale that is zero or not finite.
    """
    scale = stored.float().reshape(())
    if not torch.isfinite(scale) or scale == 0:
        raise ValueError(f"an NVFP4 global scale is {float(scale)}; the checkpoint is damaged or misread")
    return 1.0 / scale if is_divisor else scale
