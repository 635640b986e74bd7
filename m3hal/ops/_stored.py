"""Matrix products with stored operands: a weight in any format, an activation rounded as a kernel rounds it."""

from __future__ import annotations

from collections.abc import Mapping

from m3hal import formats
from m3hal._lazy import torch
from m3hal.formats import QSpec, QTensor, spec_of
from m3hal.ops._operator import Trait

ACTIVATION_FORMAT = Trait(
    "activation_format",
    ("given", "fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4"),
    True,
    "what the input of a product is rounded to; fp8 with a scale for each token, unless a scale is given or known",
)


def numbers(matrix: torch.Tensor | QTensor, compute: torch.dtype) -> torch.Tensor:
    """What the matrix stands for."""
    return formats.dequantize(matrix, compute) if isinstance(matrix, QTensor) else matrix.to(compute)


def rounded(x: torch.Tensor, global_scale: torch.Tensor | None, traits: Mapping[str, str]) -> torch.Tensor:
    """What a product takes in place of ``x``, in x's dtype; traits: ``activation_format`` and those of quantisers.

    Quantisers are defined in fp32, bit for bit: an oracle that quantised in fp64 would break ties that fp32 keeps.
    """
    format = traits.get("activation_format", "given")
    if format == "given":
        return x
    one_scale = global_scale is not None and format.startswith("fp8")
    spec = QSpec(format) if one_scale else spec_of(format)
    return formats.dequantize(formats.quantize(x.float(), spec, global_scale, traits), x.dtype)
