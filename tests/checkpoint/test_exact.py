"""The arithmetic against fractions, for every pair of codes and every distance of scales."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from m3hal.checkpoint.convert import GAUDI2, HOPPER, Profile, exact

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)]
PROFILES = pytest.mark.parametrize("profile", [GAUDI2, HOPPER], ids=lambda profile: profile.name)


@cache
def e4m3(byte: int, profile: Profile) -> Fraction | None:
    """The number a byte says on the profile's machine; None for NaN and infinities."""
    sign, field, mantissa = -1 if byte & 0x80 else 1, byte >> 3 & 15, byte & 7
    if (field == 15) if profile is GAUDI2 else (byte & 0x7F == 0x7F):
        return None
    fraction = Fraction(8 + mantissa, 8) if field else Fraction(mantissa, 8)
    return sign * fraction * Fraction(2) ** (max(field, 1) - 7)


ZERO = Fraction(0)


def mxfp4_row(codes: np.ndarray, scales: np.ndarray) -> list[Fraction]:
    """The numbers of one row."""
    nibbles = [nibble for byte in codes.tolist() for nibble in (byte & 15, byte >> 4)]
    return [
        E2M1[nibble] * Fraction(2) ** (int(scales[i // 32]) - 127) if nibble & 7 else ZERO
        for i, nibble in enumerate(nibbles)
    ]


def representable(values: list[Fraction], profile: Profile) -> bool:
    """Whether some power of two puts all numbers onto normal ones of the profile's window; searched, not derived."""
    return _representable(frozenset(abs(value) for value in values if value), profile)


@cache
def _representable(wanted: frozenset[Fraction], profile: Profile) -> bool:
    return not wanted or any(wanted <= _numbers(exponent, profile) for exponent in range(-60, 60))


@cache
def _numbers(exponent: int, profile: Profile) -> frozenset[Fraction]:
    window = range(profile.bottom, profile.top + 1)
    return frozenset(Fraction(half, 2) * Fraction(2) ** (e + exponent) for e in window for half in (2, 3))


def encode(codes: np.ndarray, scales: np.ndarray, profile: Profile) -> tuple[np.ndarray, np.ndarray, bool]:
    """Bytes, scales, and whether the converter itself finds them equal."""
    encoder = exact.Encoder(profile, scales.shape[1], len(codes))
    fp8, weight_scale = encoder.encode(codes, scales)
    return fp8, weight_scale, encoder.equal(codes, scales, fp8, weight_scale)


def pair_rows(distance: int) -> tuple[np.ndarray, np.ndarray]:
    """256 rows of two blocks: every code of the low block against every code of the high one."""
    first, second = np.divmod(np.arange(256), 16)
    nibbles = np.zeros((256, 64), np.uint8)
    nibbles[:, 5], nibbles[:, 40] = first, second
    scales = np.tile(np.array([[110, 110 + distance]], np.uint8), (256, 1))
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4, scales


@PROFILES
@pytest.mark.parametrize("distance", range(16))
def test_every_pair_of_codes_at_every_distance(profile: Profile, distance: int) -> None:
    """A row is equal to its source exactly when some scale can make it so, judged element by element in fractions."""
    codes, scales = pair_rows(distance)
    fp8, weight_scale, _ = encode(codes, scales, profile)
    encoder = exact.Encoder(profile, 2, 1)
    for row in range(256):
        want = mxfp4_row(codes[row], scales[row])
        one = slice(row, row + 1)
        found = encoder.equal(codes[one], scales[one], fp8[one], weight_scale[one])
        assert found == representable(want, profile), (row, want)
        if found:
            factor = Fraction(float(weight_scale[row, 0]))
            said = {column: e4m3(int(fp8[row, column]), profile) for column in np.flatnonzero(fp8[row]).tolist()}
            assert {column: value * factor for column, value in said.items() if value is not None} == {
                column: value for column, value in enumerate(want) if value
            }


@PROFILES
def test_bytes_stay_normal(profile: Profile) -> None:
    """Never -0, a subnormal, NaN or infinity; for Gaudi 2 also not after its loader has halved every weight."""
    for distance in range(9):
        codes, scales = pair_rows(distance)
        fp8, _, same = encode(codes, scales, profile)
        assert same
        fields = (fp8 >> 3) & 15
        assert not np.any((fp8 != 0) & (fields == 0))
        assert not np.any(fp8 == 0x80)
        assert not np.any((fp8 & 0x7F) == 0x7F)
        if profile is GAUDI2:
            assert fields.max() <= 14
            assert fields[fp8 != 0].min() >= 2


def test_halving_after_conversion_is_exact() -> None:
    """Weights halved and re-cast with scales doubled, as vllm-gaudi does, say the same numbers."""
    import torch

    codes, scales = pair_rows(9)
    keep = [row for row in range(256) if representable(mxfp4_row(codes[row], scales[row]), GAUDI2)]
    fp8, weight_scale, same = encode(codes[keep], scales[keep], GAUDI2)
    assert same
    whole = torch.from_numpy(fp8.copy()).view(torch.float8_e4m3fn).double()
    halved = (whole.to(torch.bfloat16) * 0.5).to(torch.float8_e4m3fn).double()
    scale = torch.from_numpy(weight_scale).double()
    assert torch.equal(halved * (2 * scale), whole * scale)


@pytest.mark.parametrize(("profile", "widest"), [(GAUDI2, 9), (HOPPER, 11)])
def test_spread_with_all_magnitudes(profile: Profile, widest: int) -> None:
    """With all seven magnitudes in both blocks, that many binades between scales pass and one more does not."""
    nibbles = np.tile(np.arange(16, dtype=np.uint8), 4)[None]
    codes = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    for distance in (widest, widest + 1):
        scales = np.array([[100, 100 + distance]], np.uint8)
        assert encode(codes, scales, profile)[2] == (distance == widest)


def test_negative_zero_and_empty_rows() -> None:
    """Code 8 becomes 0x00; a row of zeros gets the scale 1.0, whatever its block scales."""
    codes = np.full((1, 32), 0x80, np.uint8)
    fp8, weight_scale, same = encode(codes, np.array([[0, 254]], np.uint8), GAUDI2)
    assert same
    assert not fp8.any()
    assert weight_scale.tolist() == [[1.0]]


def test_low_nibble_is_the_even_column() -> None:
    """Byte 0x21 is 0.5, then 1.0; a ramp keeps its order."""
    nibbles = np.tile(np.arange(16, dtype=np.uint8), 2)[None]
    codes = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    assert codes[0, 0] == 0x10
    fp8, weight_scale, _ = encode(codes, np.array([[127]], np.uint8), HOPPER)
    factor = Fraction(float(weight_scale[0, 0]))
    assert [e4m3(byte, HOPPER) * factor for byte in fp8[0].tolist()] == [*E2M1, *E2M1]  # type: ignore[operator]


def test_scale_bytes_are_exponents() -> None:
    """Byte 119 is 2^-8, not 119."""
    codes = np.full((1, 16), 0x22, np.uint8)
    fp8, weight_scale, _ = encode(codes, np.array([[119]], np.uint8), HOPPER)
    assert e4m3(int(fp8[0, 0]), HOPPER) * Fraction(float(weight_scale[0, 0])) == Fraction(1, 256)  # type: ignore[operator]


@PROFILES
def test_equal_finds_every_single_bit(profile: Profile) -> None:
    """Any flipped bit of any byte or scale makes the rows unequal; the check before each write can fail."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (2, 32), np.uint8)
    scales = rng.integers(118, 121, (2, 2), np.uint8)
    fp8, weight_scale, same = encode(codes, scales, profile)
    assert same
    encoder = exact.Encoder(profile, 2, 2)
    fp8 = fp8.copy()
    for byte in range(fp8.size):
        for bit in range(8):
            fp8.reshape(-1)[byte] ^= 1 << bit
            assert not encoder.equal(codes, scales, fp8, weight_scale), (byte, bit)
            fp8.reshape(-1)[byte] ^= 1 << bit
    bits = weight_scale.view(np.uint32)
    for bit in range(32):
        bits[1, 0] ^= np.uint32(1 << bit)
        assert not encoder.equal(codes, scales, fp8, weight_scale), bit
        bits[1, 0] ^= np.uint32(1 << bit)
    assert encoder.equal(codes, scales, fp8, weight_scale)


def test_a_misfit_is_never_equal_to_a_misfit() -> None:
    """Numbers outside the tables are unequal to whatever was written for them."""
    codes = np.full((1, 32), 0x77, np.uint8)
    for far in (0, 254):
        scales = np.array([[127, far]], np.uint8)
        assert not encode(codes, scales, GAUDI2)[2]


def test_bf16() -> None:
    """Every code under every scale whose numbers are normal BF16; the others are found unequal."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 8, 32)[:, :, :16].repeat(255, 0).reshape(-1, 16)
    scales = np.arange(255, dtype=np.uint8).repeat(8)[:, None]
    for first in range(0, len(codes), 8):
        part = slice(first, first + 8)
        data = exact.to_bf16(codes[part], scales[part])
        normal = 2 <= scales[first, 0] <= 252
        assert exact.bf16_equal(codes[part], scales[part], data) == bool(normal), scales[first, 0]
    one = exact.to_bf16(np.full((1, 16), 0x12, np.uint8), np.array([[127]], np.uint8)).view(np.uint16)
    assert one[0, :2].tolist() == [0x3F80, 0x3F00]  # 1.0, 0.5
