"""E4M3, the eight-bit float with four exponent and three mantissa bits, in its two ranges.

OCP's (``float8_e4m3fn``) reaches 448 and has NaN at 0x7F only. Gaudi 2's keeps the IEEE top binade: it reaches 240,
0x78 is infinity and 0x79 to 0x7F are NaN. The ranges read 14 of the 256 bytes differently.
Source: OCP 8-bit Floating Point 1.0; Habana's Gaudi 2 simulator sources.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from m3hal._lazy import torch
from m3hal.formats._codes import as_bytes, look_up, nearest, wide, with_sign

Maximum = Literal[448, 240]
OCP: Maximum = 448
GAUDI2: Maximum = 240
NAN = 0x7F
#: the smallest positive number
TINY = 2.0**-9


def encode(x: torch.Tensor, maximum: Maximum = OCP) -> torch.Tensor:
    """uint8 codes: rounded to nearest, ties to even, saturating at the maximum, infinity too.

    The sign of zero survives; NaN becomes 0x7F in both ranges.
    """
    x = wide(x)
    codes = nearest(x, mantissa_bits=3, min_exponent=-6, largest=maximum)
    return with_sign(codes, x, 0x80).masked_fill(x.isnan(), NAN)


def decode(codes: torch.Tensor, maximum: Maximum = OCP) -> torch.Tensor:
    """fp32 numbers of uint8 codes."""
    return look_up(as_bytes(codes), _table(codes.device, maximum))


def rounded(x: torch.Tensor, maximum: Maximum = OCP) -> torch.Tensor:
    """x rounded to the format, in x's dtype."""
    return decode(encode(x, maximum), maximum).to(x.dtype)


@cache
def _table(device: torch.device, maximum: Maximum) -> torch.Tensor:
    subnormal = [mantissa * TINY for mantissa in range(8)]
    normal = [(8 + mantissa) * TINY * 2.0**exponent for exponent in range(15) for mantissa in range(8)]
    finite = [value for value in subnormal + normal if value <= maximum]
    beyond = [] if maximum == OCP else [float("inf")]
    half = [*finite, *beyond, *[float("nan")] * (128 - len(finite) - len(beyond))]
    positive = torch.tensor(half, dtype=torch.float32, device=device)
    return torch.cat([positive, -positive])
