"""quantize and dequantize as operators: what the formats give, in the shapes that the fakes promise."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from m3hal_conformance import assert_same_bits, run_guarded

from m3hal import formats, ops
from m3hal.formats import FORMATS, QTensor, spec_of
from m3hal.reference import with_out

X = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(5))


def call(name: str, argument: object, **statics: object) -> object:
    """Between guard bands, into outputs made by the fake."""
    operator = ops.load(name)
    named = {operator.inputs[0]: argument}
    return run_guarded(with_out(partial(operator.reference, **statics)), named, operator.fake(argument, **statics))


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_quantize_and_back(format: str, rows: int) -> None:
    """The fake's shapes and dtypes fit, the bytes are the format's, and dequantize returns its numbers."""
    x = X[:rows]
    q = call("quantize", x, activation_format=format)
    assert isinstance(q, QTensor)
    expected = formats.quantize(x, spec_of(format))
    assert_same_bits(q.data, expected.data)
    assert (q.scale is None) == (expected.scale is None)
    if q.scale is not None and expected.scale is not None:
        assert_same_bits(q.scale, expected.scale)
    for dtype in ("float32", "bfloat16"):
        numbers = call("dequantize", q, dtype=dtype)
        assert isinstance(numbers, torch.Tensor)
        assert_same_bits(numbers, formats.dequantize(expected, getattr(torch, dtype)))


def test_scale_rules_are_traits() -> None:
    """An MXFP8 block of 450 saturates under the OCP rule; each format's own rule is what no trait means."""
    x = torch.full((1, 32), 450.0)
    reference = ops.load("quantize").reference
    for format, traits, scale in (
        ("mxfp8", {}, 128),
        ("mxfp8", {"mx_scale_rule": "own"}, 128),
        ("mxfp8", {"mx_scale_rule": "floor"}, 127),
        ("mxfp4", {}, 134),  # 450 = 1.76 * 2**8 counts as 2**9
        ("mxfp4", {"mx_scale_rule": "floor"}, 133),
        ("mxfp4", {"mx_scale_rule": "ceil"}, 134),
    ):
        assert reference(x, activation_format=format, traits=traits).scale.tolist() == [[scale]], (format, traits)
