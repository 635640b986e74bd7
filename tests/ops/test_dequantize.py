"""dequantize: exact in fp32; one rounding on the way to bf16."""

import pytest
import torch
from m3hal_conformance import assert_same_bits
from m3hal_conformance.inputs import generator, tail_heavy

from m3hal.formats import QSpec, QTensor
from m3hal.ops.dequantize import dequantize
from m3hal.ops.quantize import quantize


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_round_trip(run, stored, dtype, tokens):
    """What was stored comes back, rounded at most once more."""
    x = tail_heavy(tokens, 32, rng=generator("dequantize"))
    out = run("dequantize", quantize(x, activation_format=stored), dtype=dtype)
    assert_same_bits(out, x.to(getattr(torch, stored)).to(getattr(torch, dtype)))


def test_unknown_formats():
    """Refused by name on both sides."""
    with pytest.raises(ValueError, match="'mxfp3'"):
        dequantize(QTensor(torch.ones(1), QSpec("mxfp3")), dtype="float32")
    with pytest.raises(ValueError, match="'int7'"):
        dequantize(quantize(torch.ones(1), activation_format="float32"), dtype="int7")
