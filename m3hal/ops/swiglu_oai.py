"""The clamped SwiGLU of MiniMax-M3's MLPs and experts (that of gpt-oss, on ``[gate | up]`` halves).

    gate = min(gate, limit);  up = clamp(up, -limit, limit)
    out  = gate * sigmoid(alpha * gate) * (up + beta)

Source: transformers ``MiniMaxM3VLDenseMLP``; vLLM ``swigluoai_uninterleave``. Plain SwiGLU is another operator.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.ops._operator import Numeric, Operator


def swiglu_oai(gate_up: torch.Tensor, *, alpha: float, beta: float, limit: float) -> torch.Tensor:
    """Gated activation over the last axis.

    Args:
        gate_up: [..., 2*I], the gate's I values first, then the up projection's.
        alpha, beta, limit: 1.702, 1.0 and 7.0 in MiniMax-M3. The gate has no lower limit.

    Returns:
        [..., I] in gate_up's dtype; a NaN stays NaN.
    """
    compute = torch.promote_types(gate_up.dtype, torch.float32)
    return activate(gate_up.to(compute), alpha, beta, limit).to(gate_up.dtype)


def activate(gate_up: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    """The activation in the dtype of ``gate_up``; for the references of other operators."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def fake(gate_up: torch.Tensor, **_: object) -> torch.Tensor:
    """Empty and contiguous, half as wide."""
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


OPERATOR = Operator(
    name="swiglu_oai",
    kind="core",
    reference=swiglu_oai,
    fake=fake,
    numeric=Numeric("U1"),
    sites=("dense_mlp", "moe"),
    source="transformers minimax_m3_vl; vLLM swigluoai_uninterleave",
)
