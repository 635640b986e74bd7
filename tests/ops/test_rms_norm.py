"""rms_norm: the Gemma convention, one rounding, rows that keep to themselves."""

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows, assert_ulp, worst_row
from m3hal_conformance.inputs import generator, tail_heavy

from m3hal.ops.rms_norm import rms_norm

GEMMA = {"eps": 1e-6, "weight_offset": 1.0}


def case(tokens, n, dtype=torch.bfloat16):
    rng = generator(f"rms_norm/{tokens}/{n}")
    return tail_heavy(tokens, n, rng=rng).to(dtype), (0.1 * torch.randn(n, generator=rng)).to(dtype)


@pytest.mark.parametrize("n", [128, 6144])
@pytest.mark.parametrize("tokens", [0, 1, 7, 513])
def test_bf16_is_rounded_once(run, exact, tokens, n):
    """bf16 in and out, fp32 inside: the exact value rounded."""
    x, weight = case(tokens, n)
    out, oracle = run("rms_norm", x, weight, **GEMMA), exact("rms_norm", x, weight, **GEMMA)
    assert_ulp(out, oracle, 0.51)


def test_one_plus_weight_is_fp32(run, exact):
    """1 + w in bf16 would cost 2.5e-3 in the norm of the output, where one rounding costs 1.7e-3."""
    x, weight = case(513, 128)
    oracle = exact("rms_norm", x, weight, **GEMMA)
    assert (run("rms_norm", x, weight, **GEMMA) - oracle).norm() <= 1.8e-3 * oracle.norm()
    early = rms_norm(x, 1 + weight, eps=1e-6, weight_offset=0.0)
    assert (early - oracle).norm() > 2.2e-3 * oracle.norm()


def test_fp32(run, exact):
    """fp32 stays fp32."""
    x, weight = case(33, 6144, torch.float32)
    assert_rows(run("rms_norm", x, weight, **GEMMA), exact("rms_norm", x, weight, **GEMMA), 1e-6)


def test_the_weight_is_stored_around_zero(run):
    """Weight 0 leaves x / rms, weight -1 leaves exactly 0; a plain norm has offset 0."""
    x, _ = case(5, 128, torch.float32)
    unit = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    assert_rows(run("rms_norm", x, torch.zeros(128), **GEMMA), unit, 1e-6)
    assert not run("rms_norm", x, torch.full((128,), -1.0), **GEMMA).any()
    assert_rows(run("rms_norm", x, torch.ones(128), eps=1e-6, weight_offset=0.0), unit, 1e-6)


def test_rows_of_zeros_and_extremes(run):
    """Zero stays zero through eps; 1e4 and 1e-6 stay finite; eps rules a row of 1e-6."""
    x = torch.tensor([0.0, 1e4, 1e-6], dtype=torch.bfloat16)[:, None].expand(3, 128)
    out = run("rms_norm", x, torch.zeros(128), **GEMMA).float()
    assert not out[0].any()
    assert out[1].eq(1.0).all()
    assert out[2].sub(1e-6 / (1e-12 + 1e-6) ** 0.5).abs().max() < 1e-5


def test_a_nan_keeps_to_its_row(run):
    """One NaN makes its own row NaN and changes no other bit."""
    x, weight = case(9, 128)
    clean = run("rms_norm", x, weight, **GEMMA)
    x[4, 77] = torch.nan
    out = run("rms_norm", x, weight, **GEMMA)
    assert out[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(out[others], clean[others])


def test_heads_are_normalised_one_by_one(run):
    """Per-head norm: a head ten times as large changes no other head."""
    x = tail_heavy(3, 4, 128, rng=generator("rms_norm/heads"))
    weight = torch.zeros(128)
    clean = run("rms_norm", x, weight, **GEMMA)
    x[:, 1] *= 10
    out = run("rms_norm", x, weight, **GEMMA)
    assert torch.equal(out[:, [0, 2, 3]], clean[:, [0, 2, 3]])
    assert_rows(out[:, 1], clean[:, 1], 1e-5)


def test_a_slice_of_the_projection(run):
    """Heads cut out of a wider row, as the indexer's are, give what their copy gives."""
    row = tail_heavy(6, 9 * 128 + 5, rng=generator("rms_norm/slice"))
    heads = row[:, 5 + 128 : 5 + 128 * 4].view(6, 3, 128)
    weight = 0.1 * torch.randn(128, generator=generator("w"))
    assert torch.equal(run("rms_norm", heads, weight, **GEMMA), run("rms_norm", heads.clone(), weight, **GEMMA))


def test_a_row_does_not_depend_on_its_batch():
    """The same bits alone and among others."""
    x, weight = case(17, 6144)
    assert_row_alone(lambda rows: rms_norm(x[list(rows)], weight, **GEMMA), 17)


def test_constants_have_no_default():
    """A norm without its constants is refused."""
    with pytest.raises(TypeError):
        rms_norm(torch.zeros(1, 8), torch.zeros(8))


def test_the_wrong_convention_fails_the_check(exact):
    """Leaving out the offset, the fault this check is for, is far outside the bound."""
    x, weight = case(7, 128)
    assert (
        worst_row(rms_norm(x, weight, eps=1e-6, weight_offset=0.0), exact("rms_norm", x, weight, **GEMMA)).error > 0.5
    )
