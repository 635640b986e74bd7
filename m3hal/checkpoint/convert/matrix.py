"""One matrix: whether its rows can be exact, and a few of them at a time converted and decoded again.

A profile means FP8 with a scale per row, as routed experts get; None means BF16, as shared experts get.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from m3hal.checkpoint.convert import exact
from m3hal.checkpoint.convert.errors import ConversionError, InexactError
from m3hal.checkpoint.convert.profiles import Profile

_FLOAT32_TOP = 254
_BF16_FIELDS = (1, 254)  # exponent fields of BF16's normal numbers


class Matrix:
    """Converts rows of one matrix; ``blocks`` is K/32, ``rows`` the most that are given at once."""

    def __init__(self, module: str, profile: Profile | None, blocks: int, rows: int) -> None:
        self._module = module
        self._encoder = exact.Encoder(profile, blocks, rows) if profile else None

    def convert(self, codes: exact.Bytes, scales: exact.Bytes) -> tuple[exact.Bytes, npt.NDArray[np.float32]]:
        """Bytes of FP8 [rows, K], valid until the next call, and scales [rows, 1]; or BF16 [rows, 2*K] and no scales.

        Raises ConversionError unless they decode to the same numbers.
        """
        if self._encoder is not None:
            data, weight_scale = self._encoder.encode(codes, scales)
            same = self._encoder.equal(codes, scales, data, weight_scale)
        else:
            data, weight_scale = exact.to_bf16(codes, scales), np.empty((0, 1), np.float32)
            same = exact.bf16_equal(codes, scales, data)
        if not same:
            raise ConversionError(
                f"{self._module}: rows decode to other numbers than the source; the file changed while it was read, or "
                "this machine's memory is faulty, or m3hal is: please report it"
            )
        return data, weight_scale


def convert_whole(
    module: str, codes: exact.Bytes, scales: exact.Bytes, profile: Profile | None
) -> tuple[exact.Bytes, npt.NDArray[np.float32]]:
    """A whole matrix that is in memory: looked at, converted, decoded again. Raises ConversionError."""
    require_exact(module, scales, lambda row: codes[row], profile)
    return Matrix(module, profile, scales.shape[1], len(codes)).convert(codes, scales)


def require_exact(
    module: str, scales: exact.Bytes, codes_of: Callable[[int], exact.Bytes], profile: Profile | None
) -> None:
    """Raises InexactError, naming matrix, row and block, unless every row can be exact.

    The scales alone settle nearly every row; where they leave doubt, ``codes_of(row)`` is looked at.
    """
    bad = np.argwhere(scales == exact.E8M0_NAN)
    if len(bad):
        raise InexactError(f"{module}: row {bad[0][0]}, block {bad[0][1]} has the scale NaN (E8M0 byte 255)")
    lowest, highest = scales.min(axis=1).astype(int) - 1, scales.max(axis=1).astype(int) + 2
    if profile:
        low, high = _allowed(profile)
        doubtful = (highest - lowest > profile.top - profile.bottom) | (lowest < low) | (highest > high)
    else:
        doubtful = (lowest < _BF16_FIELDS[0]) | (highest > _BF16_FIELDS[1])
    for row in np.flatnonzero(doubtful).tolist():
        _require_row(f"{module}: row {row}", codes_of(row)[None], scales[row], profile)


def _allowed(profile: Profile) -> tuple[int, int]:
    """Biased exponents of a row's largest element for which the scale is usable and the number is finite in float32."""
    low, high = exact.SCALE_RANGE
    return low + profile.top, min(high + profile.top, _FLOAT32_TOP)


def _require_row(where: str, codes: exact.Bytes, scales: exact.Bytes, profile: Profile | None) -> None:
    exponents = exact.magnitude_exponents(codes)[0].astype(int)
    present = np.flatnonzero(exponents != exact.NO_ELEMENT)
    if not len(present):
        return
    biased = exponents[present] + scales[present // exact.BLOCK]
    (lo, lo_block), (hi, hi_block) = (
        (int(biased[i]), int(present[i]) // exact.BLOCK) for i in (biased.argmin(), biased.argmax())
    )
    if profile is None:
        if lo < _BF16_FIELDS[0] or hi > _BF16_FIELDS[1]:
            block = lo_block if lo < _BF16_FIELDS[0] else hi_block
            raise InexactError(f"{where}, block {block} has a number outside BF16's normal range, 2^-126 to 2^127")
        return
    if hi - lo > profile.top - profile.bottom:
        raise InexactError(
            f"{where} spans {hi - lo + 1} powers of two, from 2^{lo - 127} in block {lo_block} to 2^{hi - 127} in "
            f"block {hi_block}; one scale holds {profile.binades} (profile {profile.name}), and nothing is rounded"
        )
    low, high = _allowed(profile)
    if not low <= hi <= high:
        raise InexactError(
            f"{where}, block {hi_block} reaches 2^{hi - 127}; number or scale would leave float32's normal range, "
            f"which holds rows that reach 2^{low - 127} to 2^{high - 127}"
        )
