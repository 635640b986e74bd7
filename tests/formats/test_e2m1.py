"""E2M1 against ml_dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from format_oracle import E2M1, all_bf16, around_midpoints, decode_e2m1, encode_e2m1

from m3hal.formats import e2m1

VALUES = np.array(e2m1.MAGNITUDES, dtype=np.float32)


def test_every_code_decodes_as_ml_dtypes() -> None:
    """All 16, the sign of zero included."""
    codes = np.arange(16, dtype=np.uint8)
    ours = e2m1.decode(torch.from_numpy(codes)).numpy()
    assert ours.view(np.uint32).tolist() == codes.view(E2M1).astype(np.float32).view(np.uint32).tolist()


def test_every_bf16_encodes_as_ml_dtypes() -> None:
    """All 65,536 inputs; NaN, which the format lacks, becomes +6."""
    x = all_bf16()
    ours = e2m1.encode(torch.from_numpy(x)).numpy()
    nan = np.isnan(x)
    assert (ours[~nan] == encode_e2m1(x[~nan])).all()
    assert (ours[nan] == 7).all()
    assert nan.sum() == 254


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_midpoint_rounds_to_even_and_its_neighbours_do_not(dtype: type) -> None:
    """One fp32 (fp64) step beside a midpoint decides the direction."""
    x, index = around_midpoints(VALUES, dtype)
    assert (e2m1.encode(torch.from_numpy(x)).numpy() == index).all()
    assert (e2m1.encode(torch.from_numpy(-x)).numpy() == index + 8).all()
    if dtype is np.float32:
        assert (encode_e2m1(x) == index).all()


def test_the_even_element_is_in_the_low_half() -> None:
    """Byte 0x21 is [0.5, 1.0], and a ramp of all codes comes back."""
    assert e2m1.decode_packed(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [0.5, 1.0]
    ramp = torch.arange(32).to(torch.uint8) % 16
    assert e2m1.pack(ramp).tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2
    assert e2m1.unpack(e2m1.pack(ramp)).tolist() == ramp.tolist()


def test_packed_decoding_is_that_of_every_byte() -> None:
    """All 256 bytes against ml_dtypes."""
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    assert (e2m1.decode_packed(torch.from_numpy(packed)).numpy() == decode_e2m1(packed)).all()


def test_an_odd_number_of_codes_is_refused() -> None:
    """Half a byte can't be stored."""
    with pytest.raises(ValueError, match="3 codes don't fill whole bytes"):
        e2m1.pack(torch.zeros(3, dtype=torch.uint8))
