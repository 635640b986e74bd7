"""The arithmetic: MXFP4 rows to E4M3 rows with one power-of-two scale each, or to BF16, in integers throughout.

A nonzero E2M1 number is 1 or 1.5 times 2^e with e in -1..2, times its block's 2^(s - 127). In a row whose largest
element has exponent ``hi``, the scale 2^(hi - top) puts that element on the format's top binade and every other one
below it; nothing is rounded as long as the smallest stays above the format's bottom. Zeros are written as 0x00, also
those with a sign: 0x80 is NaN to a reader that takes the bytes for fnuz.

Codes are uint8 [rows, K/2], the low nibble being the even column; block scales are E8M0 bytes [rows, K/32].
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

from m3hal.checkpoint.convert.profiles import Profile

BLOCK = 32
E8M0_NAN = 255

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int16]

#: a row without a nonzero element has no largest exponent
NO_ELEMENT = -1000
#: smallest and largest biased exponent of a row's scale: it and its double must be normal in float32 and bfloat16
SCALE_RANGE = (1, 253)

# E2M1 magnitudes 1..7 as exponent and half: (1 + half / 2) * 2^exponent
_EXPONENT = (0, -1, 0, 0, 1, 1, 2, 2)
_HALF = (0, 0, 0, 1, 0, 1, 0, 1)
# Differences "block exponent - scale exponent" that any profile can use; table page i serves difference i + _FIRST.
_FIRST, _PAGES = -8, 18
_TILE = 1 << 18  # elements encoded at once: the working set stays in a core's second-level cache


def row_tops(codes: Bytes, scales: Bytes) -> Ints:
    """Largest exponent of each row's nonzero elements, biased by 127 as the scale bytes are; NO_ELEMENT without one."""
    words = codes.view(np.uint64).reshape(*scales.shape, 2)
    some = words[..., 0] | words[..., 1]
    both = words & (words >> np.uint64(1))  # bit 1 of a nibble: both exponent bits are set, the number is 4 or 6
    four = both[..., 0] | both[..., 1]
    tops = scales.astype(np.int16) - np.int16(1)
    tops += (some & _each(0x6)) != 0  # 1 or more
    tops += (some & _each(0x4)) != 0  # 2 or more
    tops += (four & _each(0x2)) != 0
    tops[(some & _each(0x7)) == 0] = NO_ELEMENT
    highest: Ints = tops.max(axis=1, initial=NO_ELEMENT)
    return highest


class Encoder:
    """Encodes rows of one width, a few at a time. It owns the memory it works in: one per thread.

    Fresh arrays for every chunk would cost more in page faults than the arithmetic takes.
    """

    def __init__(self, profile: Profile, blocks: int, rows: int) -> None:
        self._profile = profile
        self._out = np.empty((rows, blocks, BLOCK // 2), np.uint16)
        tile = (max(1, min(rows, _TILE // (blocks * BLOCK))), blocks, BLOCK // 2)
        self._index = np.empty(tile, np.intp)
        self._want, self._got = np.empty(tile, np.uint32), np.empty(tile, np.uint32)

    def encode(self, codes: Bytes, scales: Bytes) -> tuple[Bytes, npt.NDArray[np.float32]]:
        """E4M3 bytes [rows, K], valid until the next call, and scales float32 [rows, 1].

        The rows must be ones that the profile holds, as ``scan`` finds out.
        """
        table, out = _encoding(self._profile), self._out[: len(codes)]
        exponents = row_tops(codes, scales) - np.int16(self._profile.top)
        exponents[exponents < NO_ELEMENT // 2] = 127  # an all-zero row gets the scale 1.0
        for tile, index in self._tiles(codes, scales, exponents):
            np.take(table, index, out=out[tile], mode="clip")
        weight_scale = (exponents.astype(np.uint32) << np.uint32(23)).view(np.float32)
        return out.view(np.uint8).reshape(len(codes), -1), weight_scale[:, None]

    def equal(self, codes: Bytes, scales: Bytes, fp8: Bytes, weight_scale: npt.NDArray[np.float32]) -> bool:
        """Whether E4M3 rows say the same numbers as MXFP4 rows; decoded from the written bytes, in integers.

        Every number is taken apart into sign, exponent and a 4-bit significand, relative to the row's scale; equal
        triples are equal numbers.
        """
        bits = weight_scale.view(np.uint32)[:, 0]
        if np.any(bits & np.uint32(0x807FFFFF)) or np.any(bits == 0):
            return False
        exponents = (bits >> np.uint32(23)).astype(np.int16)
        source, target = _source_triples(), _target_triples(self._profile.ieee)
        pairs = fp8.view(np.uint16).reshape(*scales.shape, BLOCK // 2)
        for tile, index in self._tiles(codes, scales, exponents):
            want, got = self._want[: len(index)], self._got[: len(index)]
            np.take(source, index, out=want, mode="clip")
            np.take(target, pairs[tile], out=got, mode="clip")
            if not np.array_equal(want, got):
                return False
        return True

    def _tiles(self, codes: Bytes, scales: Bytes, exponents: Ints) -> Iterator[tuple[slice, npt.NDArray[np.intp]]]:
        """Rows few enough for the cache, and each code byte's index into a table of pages, the last for misfits."""
        step = len(self._index)
        for start in range(0, len(codes), step):
            tile = slice(start, min(start + step, len(codes)))
            page = scales[tile].astype(np.intp) - (exponents[tile, None].astype(np.intp) + _FIRST)
            page[(page < 0) | (page >= _PAGES)] = _PAGES
            page <<= 8
            index = self._index[: len(page)]
            yield tile, np.add(page[..., None], codes[tile].reshape(index.shape), out=index)


def to_bf16(codes: Bytes, scales: Bytes) -> Bytes:
    """BF16 bytes [rows, 2*K]. Exact where :func:`bf16_equal` says so."""
    pages = scales.astype(np.intp)[..., None] << 8
    values = np.take(_bf16_encoding(), pages + codes.reshape(*scales.shape, BLOCK // 2), mode="clip")
    return values.reshape(len(codes), -1).view(np.uint8)


def bf16_equal(codes: Bytes, scales: Bytes, bf16: Bytes) -> bool:
    """Whether the BF16 row says the same numbers as the MXFP4 row; compared in float64, which holds both exactly."""
    rows = len(codes)
    got = (bf16.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    nibbles = np.stack((codes & 0xF, codes >> 4), axis=-1).reshape(*scales.shape, BLOCK)
    want = np.ldexp(_e2m1()[nibbles], scales.astype(np.int32)[..., None] - 127)
    return bool(np.array_equal(want.reshape(rows, -1), got))


def magnitude_exponents(codes: Bytes) -> npt.NDArray[np.int16]:
    """Exponent of each element, [rows, K]; NO_ELEMENT for zeros. Slow; for rows that need a closer look."""
    nibbles = np.stack((codes & 0x7, (codes >> 4) & 0x7), axis=-1).reshape(len(codes), -1)
    return np.array([NO_ELEMENT, *_EXPONENT[1:]], np.int16)[nibbles]


def _each(nibble: int) -> np.uint64:
    return np.uint64(nibble * 0x1111111111111111)


def _pairs(single: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    """Table [pages, 16] of a nibble -> table [pages * 256] of a byte: two entries packed, the low nibble's first."""
    low, high = single[:, None, :], single[:, :, None]
    return np.stack(np.broadcast_arrays(low, high), axis=-1).reshape(-1)


@cache
def _encoding(profile: Profile) -> npt.NDArray[np.uint16]:
    """Page and byte of two codes -> two E4M3 bytes; 0x7F, a NaN in every reading, where a number doesn't fit."""
    single = np.full((_PAGES + 1, 16), 0x7F, np.uint8)
    single[:, [0, 8]] = 0x00
    for page in range(_PAGES):
        for code in (*range(1, 8), *range(9, 16)):
            exponent = _EXPONENT[code & 7] + page + _FIRST
            if profile.bottom <= exponent <= profile.top:
                single[page, code] = (code >> 3) << 7 | (exponent + 7) << 3 | _HALF[code & 7] << 2
    return _pairs(single).view(np.uint16)


_MISFIT_SOURCE, _MISFIT_TARGET = 0xFFFF, 0xFFFE  # no triple, and never equal


def _triple(negative: bool, exponent: int, significand: int) -> int:
    """significand * 2^exponent with 8 <= significand < 16, packed into 16 bits; zero is 0."""
    return negative << 15 | (exponent + 64) << 8 | significand


@cache
def _source_triples() -> npt.NDArray[np.uint32]:
    """Page and byte of two codes -> what they are worth, from the definition of E2M1."""
    single = np.full((_PAGES + 1, 16), _MISFIT_SOURCE, np.uint16)
    single[:, [0, 8]] = 0
    for page in range(_PAGES):
        for code in (*range(1, 8), *range(9, 16)):
            half, quarter = divmod(code & 7, 2)  # exponent bits, mantissa bit; exponent 0 is the subnormal 0.5
            worth = (2 + quarter) << (half - 1) if half else quarter  # in units of 1/2
            shift = 4 - worth.bit_length()
            single[page, code] = _triple(code > 7, page + _FIRST - 1 - shift, worth << shift)
    return _pairs(single).view(np.uint32)


@cache
def _target_triples(ieee: bool) -> npt.NDArray[np.uint32]:
    """Two E4M3 bytes -> what they are worth. Infinities, NaN and 0x80 are worth nothing that a source can say."""
    single = np.full((1, 256), _MISFIT_TARGET, np.uint16)
    for byte in range(256):
        field, mantissa = byte >> 3 & 15, byte & 7
        if byte == 0:
            single[0, byte] = 0
        elif (field == 15 and (ieee or mantissa == 7)) or byte == 0x80:
            continue
        else:
            worth = mantissa if field == 0 else 8 + mantissa
            shift = 4 - worth.bit_length()
            single[0, byte] = _triple(byte > 127, max(field, 1) - 10 - shift, worth << shift)
    return _pairs(single).view(np.uint32)


@cache
def _bf16_encoding() -> npt.NDArray[np.uint32]:
    """E8M0 byte and byte of two codes -> two BF16; a NaN where the number is not normal."""
    single = np.full((256, 16), 0x7FC0, np.uint16)
    single[:, [0, 8]] = 0x0000
    for scale in range(E8M0_NAN):
        for code in (*range(1, 8), *range(9, 16)):
            field = scale + _EXPONENT[code & 7]
            if 1 <= field <= 254:
                single[scale, code] = (code >> 3) << 15 | field << 7 | _HALF[code & 7] << 6
    return _pairs(single).view(np.uint32)


@cache
def _e2m1() -> npt.NDArray[np.float64]:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return np.array(positive + [-value for value in positive])
