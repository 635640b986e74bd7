"""quantize: plain formats round once; an unknown format is refused by name."""

import pytest
import torch
from m3hal_conformance import assert_same_bits
from m3hal_conformance.inputs import generator, tail_heavy

from m3hal.ops.quantize import quantize


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_plain_formats(run, format, tokens):
    """The numbers themselves, rounded to nearest even, without scales; strides of the input do not matter."""
    x = tail_heavy(tokens, 64, rng=generator("quantize"))[:, 3:51]
    q = run("quantize", x, activation_format=format)
    assert_same_bits(q.data, x.contiguous().to(getattr(torch, format)))
    assert (q.spec.format, q.scale, q.global_scale) == (format, None, None)


def test_ties_go_to_even(run):
    """1 + 2**-8 lies between two bf16 numbers."""
    x = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8]])
    assert run("quantize", x, activation_format="bfloat16").data.tolist() == [[1.0, 1 + 2**-6, -1.0]]


def test_the_result_is_its_own():
    """Also where there is nothing to round, the codes are not the caller's memory."""
    x = torch.ones(2, 4)
    assert quantize(x, activation_format="float32").data.data_ptr() != x.data_ptr()


def test_unknown_format():
    """Named, with what exists."""
    with pytest.raises(ValueError, match="unknown format 'nvfp5'; m3hal knows float32, bfloat16"):
        quantize(torch.ones(1, 4), activation_format="nvfp5")
