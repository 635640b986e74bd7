"""add_rms_norm: the norm sees the sum before it is rounded; the residual is rounded once."""

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows, assert_same_bits, assert_ulp
from m3hal_conformance.inputs import generator, tail_heavy

from m3hal.ops import load
from m3hal.ops.add_rms_norm import add_rms_norm
from m3hal.ops.rms_norm import rms_norm

GEMMA = {"eps": 1e-6, "weight_offset": 1.0}


def case(tokens, n, dtype=torch.bfloat16):
    rng = generator(f"add_rms_norm/{tokens}/{n}")
    x, residual = tail_heavy(tokens, n, rng=rng), 3 * tail_heavy(tokens, n, rng=rng)
    return x.to(dtype), residual.to(dtype), (0.1 * torch.randn(n, generator=rng)).to(dtype)


@pytest.mark.parametrize("n", [128, 6144])
@pytest.mark.parametrize("tokens", [0, 1, 7, 513])
def test_bf16_is_rounded_once(run, exact, tokens, n):
    """Both outputs are the exact ones rounded to bf16."""
    inputs = case(tokens, n)
    (out, residual_out), (oracle, total) = (
        run("add_rms_norm", *inputs, **GEMMA),
        exact("add_rms_norm", *inputs, **GEMMA),
    )
    assert_ulp(out, oracle, 0.51)
    assert_same_bits(residual_out, total.to(torch.bfloat16))


def test_fp32(run, exact):
    """fp32 stays fp32."""
    inputs = case(33, 6144, torch.float32)
    (out, residual_out), (oracle, total) = (
        run("add_rms_norm", *inputs, **GEMMA),
        exact("add_rms_norm", *inputs, **GEMMA),
    )
    assert_rows(out, oracle, 1e-6)
    assert_same_bits(residual_out, total.float())


def test_what_the_unrounded_sum_is_worth():
    """Rounding the sum first, as some vendors do, moves a fifth of the outputs, none by more than one unit."""
    x, residual, weight = case(257, 6144)
    out, residual_out = add_rms_norm(x, residual, weight, **GEMMA)
    rounded, same_residual = add_rms_norm(x, residual, weight, **GEMMA, traits={"add_norm_round": "bfloat16"})
    assert_same_bits(rounded, rms_norm(residual_out, weight, **GEMMA))
    assert_same_bits(same_residual, residual_out)
    assert 0.1 < (rounded != out).float().mean() < 0.4
    assert_ulp(rounded, out.float(), 1.0)


def test_rows_of_zeros_and_one_nan(run):
    """x = -residual gives zeros; a NaN keeps to its row, in both outputs."""
    x, residual, weight = case(5, 128)
    x[1] = -residual[1]
    residual[3, 0] = torch.nan
    out, residual_out = run("add_rms_norm", x, residual, weight, **GEMMA)
    assert not out[1].any()
    assert not residual_out[1].any()
    assert out[3].isnan().all()
    assert residual_out[3].isnan().sum() == 1
    assert out[[0, 1, 2, 4]].isfinite().all()


def test_strided_inputs(run):
    """Rows of wider tensors give what their copies give."""
    x, residual, weight = case(6, 512)
    views = (x[:, 100:228], residual[:, 7:135], weight[:128])
    for mine, copied in zip(
        run("add_rms_norm", *views, **GEMMA),
        run("add_rms_norm", *(view.clone() for view in views), **GEMMA),
        strict=True,
    ):
        assert torch.equal(mine, copied)


def test_residual_keeps_its_dtype(run):
    """An fp32 residual stream beside bf16 activations stays fp32."""
    x, residual, weight = case(3, 128)
    out, residual_out = run("add_rms_norm", x, residual.float(), weight, **GEMMA)
    assert (out.dtype, residual_out.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(residual_out, x.float() + residual.float())


def test_a_row_does_not_depend_on_its_batch():
    """The same bits alone and among others."""
    x, residual, weight = case(17, 6144)
    assert_row_alone(lambda rows: add_rms_norm(x[list(rows)], residual[list(rows)], weight, **GEMMA)[0], 17)


def test_the_trait_is_declared():
    """What the reference emulates is in the closed vocabulary."""
    (trait,) = load("add_rms_norm").traits
    assert (trait.name, trait.values, trait.emulated) == ("add_norm_round", ("float32", "bfloat16"), True)
