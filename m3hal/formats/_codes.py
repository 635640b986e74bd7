"""What the small float codecs share: rounding to a list of magnitudes, and looking codes up in a table."""

from __future__ import annotations

import math

from m3hal._lazy import torch


def as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8: codes come as uint8 or labelled with a one-byte float dtype.

    A label is never trusted to decode: on Gaudi 2, torch's float8_e4m3fn names bytes that mean other numbers.
    """
    if codes.dtype == torch.uint8:
        return codes
    if codes.element_size() != 1 or not codes.is_floating_point():
        raise ValueError(f"codes and scale bytes are uint8 or a one-byte float dtype, not {codes.dtype}")
    return codes.view(torch.uint8)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype that quantisers compute in: fp32, or fp64 when x is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def divided(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, correctly rounded on every device: torch's GPUs multiply by the reciprocal of a Python number."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def nearest(x: torch.Tensor, mantissa_bits: int, min_exponent: int, largest: float) -> torch.Tensor:
    """uint8 code of the number nearest to |x|, ties to even, beyond ``largest`` the code of that; 0 for NaN.

    The numbers are those of a float with so many mantissa bits whose smallest normal one is ``2**min_exponent``. In
    each binade they are equally spaced, and codes count them from 0 up, across the binades.
    """
    magnitude = x.abs().nan_to_num(nan=0.0).clamp(max=largest)
    binade = torch.frexp(magnitude.clamp(min=2.0**min_exponent)).exponent - 1 - min_exponent
    spacings = [2.0 ** (min_exponent - mantissa_bits + i) for i in range(int(math.log2(largest)) - min_exponent + 1)]
    spacing = look_up(binade, torch.tensor(spacings, dtype=x.dtype, device=x.device))
    codes: torch.Tensor = binade * 2**mantissa_bits + torch.round(magnitude / spacing)
    return codes.to(torch.uint8)


def with_sign(codes: torch.Tensor, x: torch.Tensor, sign: int) -> torch.Tensor:
    """``codes`` with the bit ``sign`` set where x is negative or -0."""
    return codes | (torch.signbit(x).to(torch.uint8) * sign)


def look_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``table[codes]``; rows of a table with two axes become the last axis."""
    return torch.index_select(table, 0, codes.flatten().int()).reshape(codes.shape + table.shape[1:])


def grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """[..., n] as [..., n / group, group]."""
    if x.shape[-1] % group:
        raise ValueError(f"{group} neighbours share a scale, and {x.shape[-1]} elements don't fill groups; pad them")
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
