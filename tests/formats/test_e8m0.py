"""E8M0 and the rules by which a block gets its scale."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from format_oracle import E8M0, all_bf16

from m3hal.formats import e8m0


def test_every_code_decodes_as_ml_dtypes() -> None:
    """All 256: 0 is 2**-127, 255 is NaN; also when the bytes carry their torch dtype."""
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(E8M0).astype(np.float32)
    for tensor in (torch.from_numpy(codes), torch.from_numpy(codes).view(torch.float8_e8m0fnu)):
        ours = e8m0.decode(tensor).numpy()
        assert (ours[:255].view(np.uint32) == theirs[:255].view(np.uint32)).all()
        assert np.isnan(ours[255])
    assert theirs[0] == 2.0**-127 > 0


def test_encoding_inverts_decoding() -> None:
    """All 255 exponents, and what lies outside is clamped."""
    exponent = torch.arange(-127, 128)
    assert e8m0.encode(exponent).tolist() == list(range(255))
    assert e8m0.encode(torch.tensor([-1000, 1000])).tolist() == [0, 254]


@pytest.mark.parametrize("element_max", [448, 6])
def test_scale_rules_on_every_bf16(element_max: int) -> None:
    """All positive bf16 values against exact fractions."""
    x = all_bf16()
    x = x[(x > 0) & np.isfinite(x)]
    ours = {rule: e8m0.from_amax(torch.from_numpy(x), element_max, rule).int() - 127 for rule in _RULES}
    top = _floor_log2(Fraction(element_max))
    for i, value in enumerate(map(Fraction, x.tolist())):
        floor = _floor_log2(value)
        even = floor + (value >= Fraction(7, 4) * Fraction(2) ** floor)
        ceil = floor - top if value <= element_max * Fraction(2) ** (floor - top) else floor - top + 1
        expected = {"floor": floor - top, "even": even - top, "ceil": ceil}
        assert {rule: int(ours[rule][i]) for rule in _RULES} == {k: max(v, -127) for k, v in expected.items()}


def test_ceil_never_saturates_and_floor_does() -> None:
    """450 needs twice the scale of 448; the OCP rule keeps it and cuts 450 down."""
    amax = torch.tensor([448.0, 450.0])
    assert e8m0.decode(e8m0.from_amax(amax, 448, "ceil")).tolist() == [1, 2]
    assert e8m0.decode(e8m0.from_amax(amax, 448, "floor")).tolist() == [1, 1]


def test_zero_infinity_and_nan() -> None:
    """The smallest scale, the largest, and NaN."""
    amax = torch.tensor([0.0, float("inf"), float("nan"), 2.0**-149])
    for rule in _RULES:
        assert e8m0.from_amax(amax, 448, rule).tolist() == [0, 254, 255, 0]


_RULES: tuple[e8m0.Rule, ...] = ("ceil", "floor", "even")


def _floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if value >= Fraction(2) ** exponent else exponent - 1
