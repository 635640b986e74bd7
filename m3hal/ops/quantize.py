"""Converts activations to the format that a matrix product takes.

Source: the formats of :mod:`m3hal.formats`.
"""

from __future__ import annotations

from collections.abc import Mapping

from m3hal import formats
from m3hal._lazy import torch
from m3hal.formats import FORMATS, PLAIN_FORMATS, ROW, QTensor, plain_dtype, spec_of
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._traits import EXACT, MX_SCALE_RULE, NVFP4_QUANTIZER


def quantize(x: torch.Tensor, *, activation_format: str, traits: Mapping[str, str] = EXACT) -> QTensor:
    """Rounds ``x`` once to a format.

    Args:
        x: [..., n].
        activation_format: a name of :mod:`m3hal.formats`. fp8 gets one scale for each row, which is a token; nvfp4 has
            global scale 1.

    Returns:
        codes and scales; for a plain format the codes are the numbers and there is no scale. A number that is not
        finite changes what shares its scale, and nothing else:

        * fp8: the row. NaN gives scale NaN and codes 0x7F; an infinity gives scale infinity, its own codes 0x7F and
          zeros of either sign elsewhere, so that the whole row reads as NaN.
        * mxfp8, mxfp4: the block. NaN gives the scale byte 255, codes 0x7F or +6, and reads as NaN; an infinity gives
          scale 2**127, the largest code of its sign, and zeros of either sign for ordinary numbers.
        * nvfp4: the block. NaN has no say in the scale and becomes +6; an infinity gives scale 448 and the code 6 of
          its sign. With ``token_global`` the row: its global scale is NaN or infinity, and nothing in it reads finite.

        Any NaN is as good as another where a scale or a number of a plain format is one.

    Raises:
        ValueError: an unknown format, or n does not fill its groups.
    """
    return formats.quantize(x, spec_of(activation_format), traits=traits)


def fake(x: torch.Tensor, *, activation_format: str, **_: object) -> QTensor:
    """Empty codes and scales, contiguous."""
    spec = spec_of(activation_format)
    if spec.format in PLAIN_FORMATS:
        return QTensor(torch.empty(x.shape, dtype=plain_dtype(spec.format), device=x.device), spec)
    rows, n = x.shape[:-1], x.shape[-1]
    groups = 1 if spec.group == ROW else spec.scale_bytes(n) * 8 // FORMATS[spec.format].scale_bits
    codes = torch.empty(*rows, spec.data_bytes(n), dtype=torch.uint8, device=x.device)
    dtype = torch.float32 if spec.group == ROW else torch.uint8
    return QTensor(codes, spec, torch.empty(*rows, groups, dtype=dtype, device=x.device))


OPERATOR = Operator(
    name="quantize",
    kind="core",
    reference=quantize,
    fake=fake,
    numeric=Numeric("C1", "bit-exact, but for which NaN"),
    sites=("dense_attention", "sparse_attention", "dense_mlp", "moe"),
    traits=(NVFP4_QUANTIZER, MX_SCALE_RULE),
    source="m3hal formats",
)
