"""linear: fp32 accumulation, one rounding."""

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows, assert_ulp
from m3hal_conformance.inputs import generator, tail_heavy

from m3hal.ops.linear import linear


@pytest.mark.parametrize("k", [32, 96, 384, 416])
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_against_fp64(run, tokens, k):
    """Widths that are no multiple of a tile; the tail of the sum carries most of it."""
    rng = generator("linear")
    x, weight = tail_heavy(tokens, k, rng=rng), tail_heavy(24, k, rng=rng)
    assert_rows(run("linear", x, weight), x.double() @ weight.double().T, 1e-6)
    low = run("linear", x.bfloat16(), weight.bfloat16())
    oracle = x.bfloat16().double() @ weight.bfloat16().double().T
    assert low.dtype == torch.bfloat16
    assert_ulp(low, oracle, 1.0, scale=oracle.norm(dim=-1, keepdim=True).expand_as(oracle) / 24**0.5)


def test_long_sums_stay_fp32(run):
    """4096 ones plus a half: a bf16 accumulator would stop at 256."""
    x = torch.ones(1, 4097, dtype=torch.bfloat16)
    weight = torch.cat([torch.ones(1, 4096), torch.full((1, 1), 64.0)], -1).bfloat16()
    assert run("linear", x, weight).item() == 4160.0


def test_strided_operands(run):
    """Slices and a transposed weight."""
    rng = generator("linear/strided")
    x, weight = tail_heavy(5, 100, rng=rng)[:, 9:73], torch.randn(64, 24, generator=rng).T
    assert_rows(run("linear", x, weight), x.double() @ weight.double().T, 1e-6)


def test_a_row_does_not_depend_on_its_batch():
    """Up to the order of fp32 sums."""
    x, weight = tail_heavy(17, 96, rng=generator("linear/rows")), torch.randn(24, 96, generator=generator("w"))
    assert_row_alone(lambda rows: linear(x[list(rows)], weight), 17, bound=1e-6)


def test_a_routers_weight_keeps_its_digits(run):
    """fp32 weights of bf16 tokens give fp32, exact to its order of sums; a wider token stays wider."""
    rng = generator("linear/router")
    x, weight = torch.randn(9, 256, generator=rng).bfloat16(), torch.randn(24, 256, generator=rng)
    out = run("linear", x, weight)
    assert out.dtype == torch.float32
    assert_rows(out, x.double() @ weight.double().T, 1e-6)
    assert run("linear", x.float(), weight.bfloat16()).dtype == torch.float32
