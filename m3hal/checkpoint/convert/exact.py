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
Words = npt.NDArray[np.uint64]

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
        self._index = np.empty(tile, np.uint16)
        self._words = tuple(np.empty(self._index.size // 4, np.uint64) for _ in range(5))

    def encode(self, codes: Bytes, scales: Bytes) -> tuple[Bytes, npt.NDArray[np.float32]]:
        """E4M3 bytes [rows, K], valid until the next call, and scales float32 [rows, 1].

        The rows must be ones that the profile holds, as ``require_exact`` finds out.
        """
        table, out = _encoding(self._profile), self._out[: len(codes)]
        exponents = row_tops(codes, scales) - np.int16(self._profile.top)
        exponents[exponents < NO_ELEMENT // 2] = 127  # an all-zero row gets the scale 1.0
        for tile in self._tiles(len(codes)):
            page = scales[tile].astype(np.int16) - (exponents[tile, None] + np.int16(_FIRST))
            page[(page < 0) | (page >= _PAGES)] = _PAGES
            pages = page.astype(np.uint16) << np.uint16(8)
            index = self._index[: len(page)]
            np.add(pages[..., None], codes[tile].reshape(index.shape), out=index)
            np.take(table, index, out=out[tile], mode="clip")
        weight_scale = (exponents.astype(np.uint32) << np.uint32(23)).view(np.float32)
        return out.view(np.uint8).reshape(len(codes), -1), weight_scale[:, None]

    def equal(self, codes: Bytes, scales: Bytes, fp8: Bytes, weight_scale: npt.NDArray[np.float32]) -> bool:
        """Whether E4M3 rows say the same numbers as MXFP4 rows, by the written bytes and scales alone, in integers.

        Both are taken apart into sign, exponent and mantissa; equal parts are equal numbers. No table of the encoder
        is used.
        """
        bits = weight_scale.view(np.uint32)[:, 0]
        if np.any(bits & np.uint32(0x807FFFFF)) or np.any(bits == 0):
            return False  # no positive, normal power of two
        # An E2M1 exponent field e (0..3) is 2^(e - 1) times 2^(s - 127); E4M3's field f is 2^(f - 7) times the scale.
        shift = scales.astype(np.int16) - (bits >> np.uint32(23)).astype(np.int16)[:, None] + np.int16(6)
        far = (shift < -3) | (shift > 15)
        if np.any(far):  # legal over zeros only
            if np.any(codes.reshape(*scales.shape, BLOCK // 2)[far] & 0x77):
                return False
            shift[far] = 0
        return all(self._same(codes[tile], shift[tile], fp8[tile]) for tile in self._tiles(len(codes)))

    def _same(self, codes: Bytes, shift: Ints, fp8: Bytes) -> bool:
        """Eight elements at a time, one to a byte of a 64-bit word.

        A field above 15 or below 0 would first run into its own sign bit, so equal signs and equal words together
        exclude it, and with it any carry into the next byte.
        """
        written = fp8.reshape(-1).view(np.uint64)
        source, nonzero, fields, half, spare = (words[: len(written)] for words in self._words)
        np.copyto(source.view(np.uint16), codes.reshape(-1))
        _shift_or(source, 4, spare)
        np.bitwise_and(source, _bytes(0x0F), out=source)  # a nibble to each byte
        np.bitwise_and(source, _bytes(0x07), out=half)
        np.add(half, _bytes(0x7F), out=nonzero)
        np.bitwise_and(nonzero, _bytes(0x80), out=nonzero)  # bit 7: not a zero
        np.right_shift(half, np.uint64(1), out=fields)
        np.bitwise_and(fields, _bytes(0x03), out=fields)
        np.right_shift(fields, np.uint64(1), out=spare)
        np.bitwise_or(spare, fields, out=spare)
        np.bitwise_and(half, spare, out=half)
        np.bitwise_and(half, _bytes(0x01), out=half)  # code 1 is the subnormal 0.5: 1 * 2^-1
        np.left_shift(source, np.uint64(4), out=source)
        np.bitwise_and(source, nonzero, out=source)  # signs
        np.bitwise_and(written, _bytes(0x80), out=spare)
        if not np.array_equal(source, spare):
            return False
        np.left_shift(fields, np.uint64(3), out=fields)
        np.left_shift(half, np.uint64(2), out=half)
        np.bitwise_or(fields, half, out=fields)
        np.bitwise_or(fields, source, out=fields)
        np.right_shift(nonzero, np.uint64(7), out=half)
        np.multiply(half, np.repeat(shift.reshape(-1).astype(np.uint64) << np.uint64(3), BLOCK // 8), out=half)
        np.add(fields, half, out=fields)
        return np.array_equal(fields, written) and self._are_normal(written, nonzero, spare)

    def _are_normal(self, written: Words, nonzero: Words, spare: Words) -> bool:
        """Exponent field 0 is no normal number, and field 15 is none where the format keeps it for infinities."""
        np.bitwise_and(written, _bytes(0x78), out=spare)
        if self._profile.ieee and np.any((spare + _bytes(0x08)) & _bytes(0x80)):
            return False
        np.add(spare, _bytes(0x78), out=spare)
        np.bitwise_and(spare, _bytes(0x80), out=spare)
        return np.array_equal(spare, nonzero)

    def _tiles(self, rows: int) -> Iterator[slice]:
        """Rows few enough for the cache."""
        step = len(self._index)
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))


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


def _bytes(value: int) -> np.uint64:
    """A byte, eight times."""
    return np.uint64(value * 0x0101010101010101)


def _shift_or(words: Words, bits: int, spare: Words) -> None:
    np.left_shift(words, np.uint64(bits), out=spare)
    np.bitwise_or(words, spare, out=words)


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
