"""E2M1, the four-bit float of MXFP4 and NVFP4: sign, two exponent bits, one mantissa bit; no infinity, no NaN.

Code = sign * 8 + magnitude index. Two codes share a byte, the even element in the low half.
Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from functools import cache

from m3hal._lazy import torch
from m3hal.formats._codes import as_bytes, look_up, nearest, wide, with_sign

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0


def encode(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15, one to a byte: rounded to nearest, ties to even, saturating.

    The sign of zero survives. NaN becomes +6, as the conversion instruction of Blackwell makes it.
    """
    x = wide(x)
    codes = nearest(x, mantissa_bits=1, min_exponent=0, largest=MAX)
    return with_sign(codes, x, 8).masked_fill(x.isnan(), 7)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """fp32 numbers of codes 0..15, one to a byte."""
    return look_up(as_bytes(codes), _table(codes.device))


def pack(codes: torch.Tensor) -> torch.Tensor:
    """[..., n] codes to [..., n / 2] bytes."""
    if codes.shape[-1] % 2:
        raise ValueError(f"two four-bit codes share a byte; {codes.shape[-1]} codes don't fill whole bytes")
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """[..., n / 2] bytes to [..., n] codes."""
    packed = as_bytes(packed)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def decode_packed(packed: torch.Tensor) -> torch.Tensor:
    """fp32 [..., n] of [..., n / 2] bytes."""
    return look_up(as_bytes(packed), _pairs(packed.device)).flatten(-2)


@cache
def _table(device: torch.device) -> torch.Tensor:
    magnitudes = torch.tensor(MAGNITUDES, dtype=torch.float32, device=device)
    return torch.cat([magnitudes, -magnitudes])


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """fp32 [256, 2]: both numbers of a byte."""
    return decode(unpack(torch.arange(256, device=device).to(torch.uint8)[:, None]))
