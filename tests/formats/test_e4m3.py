"""E4M3 in both ranges against ml_dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from format_oracle import E4M3, all_bf16, around_midpoints, decode_e4m3, encode_e4m3

from m3hal.formats import e4m3

BYTES = np.arange(256, dtype=np.uint8)


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Equal bits, or both NaN."""
    return bool(((ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))).all())


@pytest.mark.parametrize("maximum", E4M3)
def test_every_code_decodes_as_ml_dtypes(maximum: e4m3.Maximum) -> None:
    """All 256; -0 keeps its sign."""
    assert same(e4m3.decode(torch.from_numpy(BYTES), maximum).numpy(), decode_e4m3(BYTES, maximum))


@pytest.mark.parametrize("maximum", E4M3)
def test_every_bf16_encodes_as_ml_dtypes(maximum: e4m3.Maximum) -> None:
    """All 65,536 inputs, subnormal results, -0, infinities and NaN among them."""
    x = all_bf16()
    ours = e4m3.encode(torch.from_numpy(x), maximum).numpy()
    assert (ours == encode_e4m3(x, maximum)).all()
    assert e4m3.encode(torch.tensor([float("inf"), float("-inf")]), maximum).tolist() == (
        [0x7E, 0xFE] if maximum == 448 else [0x77, 0xF7]
    )


@pytest.mark.parametrize("maximum", E4M3)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_midpoint_rounds_to_even_and_its_neighbours_do_not(maximum: e4m3.Maximum, dtype: type) -> None:
    """Rounded once also from fp64: a step far below fp32's resolution decides the direction."""
    finite = decode_e4m3(BYTES, maximum)[np.isfinite(decode_e4m3(BYTES, maximum))]
    x, index = around_midpoints(np.unique(np.abs(finite)), dtype)
    assert (e4m3.encode(torch.from_numpy(x), maximum).numpy() == index).all()
    assert (e4m3.encode(torch.from_numpy(-x), maximum).numpy() == index + 0x80).all()
    if dtype is np.float32:
        assert (encode_e4m3(x, maximum) == index).all()


def test_the_ranges_differ_in_fourteen_codes() -> None:
    """0x78 to 0x7E of both signs: finite for OCP, infinity or NaN on Gaudi 2."""
    ocp, gaudi = (e4m3.decode(torch.from_numpy(BYTES), maximum) for maximum in (e4m3.OCP, e4m3.GAUDI2))
    differ = (ocp != gaudi) & ~(ocp.isnan() & gaudi.isnan())
    assert BYTES[differ.numpy()].tolist() == [*range(0x78, 0x7F), *range(0xF8, 0xFF)]
    assert gaudi[0x78] == float("inf")
    assert gaudi[0x7C].isnan()
    assert ocp[0x7C] == 384


def test_saturation_starts_at_the_maximum() -> None:
    """What rounds past the largest number becomes it."""
    x = torch.tensor([448.0, 463.9, 464.0, 1e30, 240.0, 247.9, 248.0])
    assert e4m3.rounded(x, e4m3.OCP).tolist() == [448, 448, 448, 448, 240, 240, 256]  # 248 is OCP's tie, to even
    assert e4m3.rounded(x, e4m3.GAUDI2).tolist() == [240] * 7


def test_a_label_does_not_change_the_bytes() -> None:
    """The same bytes as uint8 and as float8_e4m3fn decode alike, by the range that is asked for."""
    codes = torch.from_numpy(BYTES)
    for maximum in (e4m3.OCP, e4m3.GAUDI2):
        labelled = e4m3.decode(codes.view(torch.float8_e4m3fn), maximum)
        assert same(labelled.numpy(), e4m3.decode(codes, maximum).numpy())


def test_wider_codes_are_refused() -> None:
    """int32 codes would be someone's numbers."""
    with pytest.raises(ValueError, match=r"uint8 or a one-byte float dtype, not torch\.int32"):
        e4m3.decode(torch.zeros(3, dtype=torch.int32))
