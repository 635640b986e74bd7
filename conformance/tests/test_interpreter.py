"""The interpreter's conversions against torch's own."""

import numpy as np
import pytest
import torch
from m3hal_conformance.interpreter import convert

E4M3_CODES = np.arange(256, dtype=np.uint8)


def _bits(values: torch.Tensor) -> np.ndarray:
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.dtype.itemsize]).numpy()


def test_fp32_to_bf16_rounds_to_nearest_even():
    """Ties, carries into the exponent, subnormals and infinities."""
    values = torch.tensor([1.0, 1.00390625, 1.01171875, 0.99999994, -126.2, 1e-40, 3.4e38, float("inf"), -0.0])
    got = convert(values.numpy(), "fp32", "bf16")
    assert np.array_equal(got, _bits(values.bfloat16()).view(np.uint16))


def test_every_bf16_widens_exactly():
    """All 65,536 codes, NaN as NaN."""
    codes = np.arange(2**16, dtype=np.uint16)
    got = convert(codes, "bf16", "fp32").view(np.float32)
    exact = torch.from_numpy(codes.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    assert np.array_equal(got, exact, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), [("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2)])
def test_every_fp8_code_round_trips(name, dtype):
    """Widening then narrowing gives the code back; the NaN codes widen to NaN."""
    wide = convert(E4M3_CODES, name, "fp32").view(np.float32)
    exact = torch.from_numpy(E4M3_CODES.copy()).view(dtype).float().numpy()
    assert np.array_equal(wide, exact, equal_nan=True)
    finite = np.isfinite(wide)
    assert np.array_equal(convert(wide, "fp32", name)[finite], E4M3_CODES[finite])


def test_fp8_saturates_and_keeps_nan():
    """GPU conversions saturate: 1e6 is 448, not NaN; the round-up carry of 126.2 is kept."""
    values = np.array([1e6, -1e6, 126.2, float("nan")], dtype=np.float32)
    got = convert(convert(values, "fp32", "fp8e4nv"), "fp8e4nv", "fp32").view(np.float32)
    assert got[:3].tolist() == [448.0, -448.0, 128.0]
    assert np.isnan(got[3])


def test_shape_is_kept():
    """A strided two-dimensional array converts element by element."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert np.array_equal(convert(convert(values, "fp32", "bf16"), "bf16", "fp32").view(np.float32), values)
