"""Turns a quantised tensor back into numbers: ``code * scale * global_scale``.

Source: the formats of :mod:`m3hal.formats`.
"""

from __future__ import annotations

from m3hal import formats
from m3hal._lazy import torch
from m3hal.formats import FORMATS, PLAIN_FORMATS, QTensor, plain_dtype, spec_of
from m3hal.ops._operator import Numeric, Operator


def dequantize(q: QTensor, *, dtype: str) -> torch.Tensor:
    """The numbers that ``q`` stands for, computed in fp32 and rounded once to ``dtype``; a tensor of its own.

    Args:
        q: from ``quantize``, or a checkpoint's tensor.
        dtype: of the output, by name: "float32", "bfloat16".

    Raises:
        ValueError: an unknown format.
    """
    spec_of(q.spec.format)
    numbers = formats.dequantize(q, plain_dtype(dtype))
    return numbers.to(numbers.dtype, copy=q.spec.format in PLAIN_FORMATS, memory_format=torch.contiguous_format)


def fake(q: QTensor, *, dtype: str, **_: object) -> torch.Tensor:
    """Empty and contiguous."""
    per_byte = 2 if FORMATS[q.spec.format].bits == 4 else 1
    return torch.empty(
        (*q.data.shape[:-1], q.data.shape[-1] * per_byte), dtype=plain_dtype(dtype), device=q.data.device
    )


OPERATOR = Operator(
    name="dequantize",
    kind="core",
    reference=dequantize,
    fake=fake,
    numeric=Numeric("X"),
    sites=("dense_attention", "sparse_attention", "dense_mlp", "moe"),
    source="m3hal formats",
)
