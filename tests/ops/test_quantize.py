"""quantize: plain formats round once; an unknown format is refused by name."""

import pytest
import torch
from m3hal_conformance import assert_same_bits
from m3hal_conformance.inputs import generator, tail_heavy

from m3hal import formats
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


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("format", "bad", "reads"),
    [
        ("fp8_e4m3", NAN, [NAN] * 96),
        ("fp8_e4m3_240", -INF, [NAN] * 96),
        ("mxfp8", NAN, [NAN] * 32),
        ("mxfp8", INF, [*[0] * 8, INF, *[0] * 23]),
        ("mxfp4", NAN, [NAN] * 32),
        ("mxfp4", -INF, [*[0] * 8, -INF, *[0] * 23]),
        ("nvfp4", INF, [*[0] * 8, 2688, *[0] * 7]),
    ],
)
def test_a_broken_number_stays_with_its_scale(format, bad, reads):
    """A number that is not finite is seen in its row or block, which read as documented, and nowhere else."""
    x = torch.randn(3, 96, generator=generator("broken"))
    known = formats.dequantize(quantize(x, activation_format=format), torch.float32)
    start = 40 // len(reads) * len(reads)
    x[1, 40] = bad
    known[1, start : start + len(reads)] = torch.tensor(reads)
    got = formats.dequantize(quantize(x, activation_format=format), torch.float32)
    assert torch.equal(got.nan_to_num(nan=7e8), known.nan_to_num(nan=7e8))


def test_nvfp4_has_no_nan():
    """A NaN becomes +6 times the scale of its block, in which it has no say."""
    x = torch.randn(3, 96, generator=generator("broken")).abs()
    known = quantize(x.index_fill(1, torch.tensor(40), 0.0), activation_format="nvfp4")
    x[:, 40] = -NAN
    got = quantize(x, activation_format="nvfp4")
    assert_same_bits(got.scale, known.scale)
    assert got.data[:, 20].tolist() == (known.data[:, 20] | 7).tolist()
