"""Converts activations to the format that a matrix product takes.

Source: the formats of :mod:`m3hal.formats`.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.formats import QTensor, plain_dtype, spec_of
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._traits import NVFP4_QUANTIZER


def quantize(x: torch.Tensor, *, activation_format: str) -> QTensor:
    """Rounds ``x`` once to a format.

    Args:
        x: [..., n].
        activation_format: a name of :mod:`m3hal.formats`.

    Returns:
        codes and scales; for a plain format the codes are the numbers and there is no scale.

    Raises:
        ValueError: an unknown format.
    """
    spec = spec_of(activation_format)
    return QTensor(x.to(plain_dtype(spec.format), copy=True, memory_format=torch.contiguous_format), spec)


def fake(x: torch.Tensor, *, activation_format: str, **_: object) -> QTensor:
    """Empty codes."""
    spec = spec_of(activation_format)
    return QTensor(torch.empty(x.shape, dtype=plain_dtype(spec.format), device=x.device), spec)


OPERATOR = Operator(
    name="quantize",
    kind="core",
    reference=quantize,
    fake=fake,
    numeric=Numeric("C1", "plain formats bit-exact"),
    sites=("dense_attention", "sparse_attention", "dense_mlp", "moe"),
    traits=(
        NVFP4_QUANTIZER,
        Trait("mx_scale_rule", ("ceil", "floor"), False, "how the power-of-two scale of an MX block is rounded"),
    ),
    source="m3hal formats",
)
