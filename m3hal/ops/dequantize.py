"""Turns a quantised tensor back into numbers: ``code * scale * global_scale``, exact in fp32.

Source: the formats of :mod:`m3hal.formats`.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.formats import QTensor, plain_dtype
from m3hal.ops._operator import Numeric, Operator


def dequantize(q: QTensor, *, dtype: str) -> torch.Tensor:
    """The numbers that ``q`` stands for, rounded once to ``dtype``.

    Args:
        q: from ``quantize``, or a checkpoint's tensor.
        dtype: of the output, by name: "float32", "bfloat16".

    Raises:
        ValueError: an unknown format.
    """
    plain_dtype(q.spec.format)
    return q.data.to(plain_dtype(dtype), copy=True, memory_format=torch.contiguous_format)


def fake(q: QTensor, *, dtype: str, **_: object) -> torch.Tensor:
    """Empty and contiguous."""
    return torch.empty(q.data.shape, dtype=plain_dtype(dtype), device=q.data.device)


OPERATOR = Operator(
    name="dequantize",
    kind="core",
    reference=dequantize,
    fake=fake,
    numeric=Numeric("X"),
    sites=("dense_attention", "sparse_attention", "dense_mlp", "moe"),
    source="m3hal formats",
)
