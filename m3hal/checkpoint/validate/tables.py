"""The validator's own number formats, in float64, which holds every product below exactly.

Source: OCP Microscaling Formats 1.0 (E2M1, E8M0), OCP 8-bit floating point 1.0 (E4M3); Gaudi 2's E4M3 keeps exponent
field 15 for infinities and NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
#: byte of two codes -> the two numbers, the low nibble's first
_PAIRS = np.array([[E2M1[byte & 15], E2M1[byte >> 4]] for byte in range(256)])


def e4m3(ieee: bool) -> Doubles:
    """Byte -> value; NaN for what is no finite number."""
    byte = np.arange(256)
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent, mantissa = byte >> 3 & 0xF, byte & 0x7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    lost = (exponent == 15) if ieee else (byte & 0x7F == 0x7F)
    return np.where(lost, np.nan, sign * value)


def allowed(ieee: bool) -> npt.NDArray[np.bool_]:
    """Byte -> whether an exact conversion may write it: +0 and normal numbers with at most one fractional bit.

    For Gaudi 2 the smallest binade is left free too, because its loader may halve every weight.
    """
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 0xF, byte & 0x7
    lowest, highest = (2, 14) if ieee else (1, 15)
    good: npt.NDArray[np.bool_] = (exponent >= lowest) & (exponent <= highest) & ((mantissa == 0) | (mantissa == 4))
    good[0] = True
    return good


def mxfp4(codes: Bytes, scales: Bytes) -> Doubles:
    """Codes [rows, K/2] and scales [rows, K/32] -> values [rows, K]; a scale byte of 255 gives NaN."""
    values = np.take(_PAIRS, codes, axis=0, mode="clip")  # every byte is a valid index
    factor = np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127))
    blocks = values.reshape(*scales.shape, 32)
    blocks *= factor[..., None]
    return blocks.reshape(len(codes), -1)


def bf16(data: Bytes) -> Doubles:
    """Bytes [rows, 2*K] -> values [rows, K]."""
    wide = np.zeros((*data.reshape(len(data), -1, 2).shape[:2], 4), np.uint8)
    wide[..., 2:] = data.reshape(len(data), -1, 2)
    return wide.view("<f4")[..., 0].astype(np.float64)


def is_power_of_two(scale: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Positive, finite, normal, with an empty mantissa, and so twice and half of it as well."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mantissa, exponent = np.frexp(scale)
        good: npt.NDArray[np.bool_] = (mantissa == 0.5) & (exponent >= -125) & (exponent <= 127)
    return good
