"""E8M0, the scale of MX blocks: a byte b stands for 2**(b - 127), 255 for NaN; it has no sign and no zero.

Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from m3hal._lazy import torch
from m3hal.formats._codes import as_bytes, look_up

BIAS = 127
NAN = 255

#: how a block's scale follows from its largest magnitude, see :func:`from_amax`
Rule = Literal["ceil", "floor", "even"]


def decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 scales; code 0 is 2**-127, a subnormal number."""
    return look_up(as_bytes(codes), _table(codes.device))


def encode(exponent: torch.Tensor) -> torch.Tensor:
    """uint8 codes of 2**exponent, clamped to the format's -127..127."""
    return (exponent.clamp(-BIAS, BIAS) + BIAS).to(torch.uint8)


def from_amax(amax: torch.Tensor, element_max: float, rule: Rule) -> torch.Tensor:
    """uint8 codes of the scales of blocks whose largest magnitudes are ``amax``.

    element_max: the largest number of the element format, ``m * 2**e`` with 0.5 <= m < 1.
    rule: ``ceil``: the smallest scale with which nothing saturates (vLLM's MXFP8). ``floor``: the power of two of amax
        over that of element_max; what lies between saturates (OCP). ``even``: like floor, but from 1.75 * 2**k up amax
        counts as 2**(k+1) (vLLM's and AITER's MXFP4).

    A block of zeros gets 2**-127, one with infinity 2**127, one with NaN the NaN scale.
    """
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2**exponent, 0.5 <= mantissa < 1
    top_mantissa, top_exponent = torch.frexp(torch.tensor(element_max, dtype=amax.dtype, device=amax.device))
    exponent = exponent - top_exponent
    if rule == "ceil":
        exponent = exponent + (mantissa > top_mantissa).int()
    elif rule == "even":
        exponent = exponent + (mantissa >= 0.875).int()
    codes = encode(torch.where(amax == 0, -BIAS, exponent))
    codes = torch.where(amax.isinf(), 2 * BIAS, codes).to(torch.uint8)
    return codes.masked_fill(amax.isnan(), NAN)


@cache
def _table(device: torch.device) -> torch.Tensor:
    values = [2.0 ** (code - BIAS) for code in range(NAN)] + [float("nan")]
    return torch.tensor(values, dtype=torch.float32, device=device)
