"""swiglu_oai: the constants, the clamp, the halves."""

import math

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows, assert_ulp
from m3hal_conformance.inputs import generator, tail_heavy

from m3hal.ops.swiglu_oai import swiglu_oai

M3 = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


def test_published_numbers(run):
    """Values that plain SiLU, a missing +1, a missing clamp or a wrong alpha all miss by far."""
    gate_up = torch.tensor([[10.0, -10.0, 3.0, 7.0, 0.5, 10.0, -10.0, -9.0, -7.5, 0.25]])
    expected = torch.tensor([[55.999625, 2.4348e-6, -17.891572, -41.999719, 0.437986]])
    torch.testing.assert_close(run("swiglu_oai", gate_up, **M3), expected, rtol=2e-5, atol=0)


def test_halves_not_pairs(run):
    """[1, 2 | 3, 4] is two gates, then two ups; read as pairs it would give [2.537387, 14.909643]."""
    out = run("swiglu_oai", torch.tensor([[1.0, 2.0, 3.0, 4.0]]), **M3)
    torch.testing.assert_close(out, torch.tensor([[3.383183, 9.678293]]), rtol=1e-6, atol=0)


def test_the_clamp(run):
    """Beyond the limit nothing changes: upwards for the gate, both ways for up; the gate has no lower limit."""
    gate = torch.tensor([6.9, 7.0, 7.1, 50.0, -7.1, -50.0, -100.0])
    by_gate = run("swiglu_oai", torch.stack([gate, torch.ones(7)], -1), **M3).flatten()
    assert by_gate[1] == by_gate[2] == by_gate[3] != by_gate[0]
    assert by_gate[4] != by_gate[5]
    assert by_gate[6].abs() < 1e-37
    up = torch.tensor([6.99, 7.0, 8.0, -6.99, -7.0, -8.0])
    by_up = run("swiglu_oai", torch.stack([torch.ones(6), up], -1), **M3).flatten()
    assert by_up[1] == by_up[2] != by_up[0]
    assert by_up[4] == by_up[5] != by_up[3]


def test_nan_is_not_clamped_away(run):
    """A NaN in the gate or in up gives NaN there, and only there."""
    gate_up = torch.ones(3, 8)
    gate_up[0, 1] = gate_up[2, 6] = math.nan
    assert run("swiglu_oai", gate_up, **M3).isnan().nonzero().tolist() == [[0, 1], [2, 2]]


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("width", [2, 6144])
def test_bf16_is_rounded_once(run, exact, tokens, width):
    """The exact value rounded to bf16, on numbers on both sides of the limits."""
    gate_up = 6 * tail_heavy(tokens, width, rng=generator("swiglu")).bfloat16()
    out, oracle = run("swiglu_oai", gate_up, **M3), exact("swiglu_oai", gate_up, **M3)
    assert_ulp(out, oracle, 0.51)


def test_fp32_and_strides(run, exact):
    """A slice of a wider tensor, in fp32."""
    gate_up = 6 * tail_heavy(5, 100, rng=generator("swiglu/strided"))[:, 10:74]
    assert_rows(run("swiglu_oai", gate_up, **M3), exact("swiglu_oai", gate_up, **M3), 1e-6)


@pytest.mark.parametrize("name", ["alpha", "beta", "limit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_constant_counts(name, dtype):
    """No dtype ignores a constant; none has a default; None is not a constant."""
    gate_up = 6 * tail_heavy(4, 64, rng=generator("swiglu/constants")).to(dtype)
    assert not torch.equal(swiglu_oai(gate_up, **M3), swiglu_oai(gate_up, **{**M3, name: 0.5}))
    with pytest.raises(TypeError):
        swiglu_oai(gate_up, **{key: value for key, value in M3.items() if key != name})
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        swiglu_oai(gate_up, **{**M3, name: None})


def test_a_row_does_not_depend_on_its_batch():
    """The same bits alone and among others."""
    gate_up = 6 * tail_heavy(17, 256, rng=generator("swiglu/rows"))
    assert_row_alone(lambda rows: swiglu_oai(gate_up[list(rows)], **M3), 17)
