"""linear with stored weights and rounded inputs; K need not fill anyone's tile."""

from __future__ import annotations

import pytest
import torch
from m3hal_conformance import assert_rows
from m3hal_conformance.inputs import generator

from m3hal import formats
from m3hal.formats import FORMATS, spec_of
from m3hal.ops.linear import linear


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("width", [32, 96, 384, 416])
def test_stored_weights(run, format, width):
    """The product with the numbers that the weight stands for, summed in fp64."""
    rng = generator(f"linear/{width}")
    x, weight = torch.randn(5, width, generator=rng), torch.randn(7, width, generator=rng)
    q = formats.quantize(weight, spec_of(format))
    expected = x.double() @ formats.dequantize(q, torch.float64).T
    assert_rows(run("linear", x, q), expected, 1e-6)
    assert run("linear", x[:0].bfloat16(), q).shape == (0, 7)
    assert_rows(linear(x.double(), q), expected, 1e-14)


@pytest.mark.parametrize("format", [name for name in FORMATS if spec_of(name).group])
def test_rounded_inputs(format):
    """The same product of the dequantised input; bf16 inputs give bf16."""
    rng = generator("linear/rounded")
    x, weight = (torch.randn(rows, 64, generator=rng).bfloat16() for rows in (5, 7))
    out = linear(x, weight, traits={"activation_format": format})
    expected = formats.dequantize(formats.quantize(x, spec_of(format))).double() @ weight.double().T
    assert out.dtype == torch.bfloat16
    assert_rows(out, expected, 3e-3)
    assert not torch.equal(out, linear(x, weight))


def test_mx_rules_and_nvfp4_quantisers_reach_the_input():
    """The traits of quantize hold here as well."""
    x, weight = torch.full((1, 32), 450.0), torch.eye(32)
    for traits, expected in (
        ({"activation_format": "mxfp8"}, 448.0),  # 450 / 2 = 225 rounds to 224
        ({"activation_format": "mxfp8", "mx_scale_rule": "floor"}, 448.0),
        ({"activation_format": "mxfp4", "mx_scale_rule": "floor"}, 384.0),
        ({"activation_format": "mxfp4"}, 512.0),
        ({"activation_format": "nvfp4"}, 6 * 72.0),  # 450 / 6 = 75 rounds to 72
        ({"activation_format": "nvfp4", "nvfp4_quantizer": "token_global"}, 450.0),
    ):
        assert linear(x, weight, traits=traits)[0, 0] == pytest.approx(expected, rel=1e-6), traits
