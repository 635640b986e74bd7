"""What the small float codecs share: rounding to a list of magnitudes, and looking codes up in a table."""

from __future__ import annotations

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


def nearest(x: torch.Tensor, magnitudes: tuple[float, ...]) -> torch.Tensor:
    """uint8 index of the magnitude nearest to |x|; a tie goes to the even index; beyond the last: the last.

    ``magnitudes`` ascend from 0. NaN gives the last, and the caller has to say what it wants.
    """
    listed = torch.tensor(magnitudes, dtype=torch.float64, device=x.device)
    middles = ((listed[1:] + listed[:-1]) / 2).to(x.dtype)  # exact: one bit more than the format's mantissa
    distance = x.abs().contiguous()
    below = torch.bucketize(distance, middles, out_int32=True)  # on a middle: the lower
    above = torch.bucketize(distance, middles, out_int32=True, right=True)  # on a middle: the upper
    return torch.where(below % 2 == 0, below, above).to(torch.uint8)


def with_sign(codes: torch.Tensor, x: torch.Tensor, sign: int) -> torch.Tensor:
    """``codes`` with the bit ``sign`` set where x is negative or -0."""
    return codes | (torch.signbit(x).to(torch.uint8) * sign)


def look_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``table[codes]``; rows of a table with two axes become the last axis."""
    return table[as_bytes(codes).int()]


def grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """[..., n] as [..., n / group, group]."""
    if x.shape[-1] % group:
        raise ValueError(f"{group} neighbours share a scale, and {x.shape[-1]} elements don't fill groups; pad them")
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
