"""allreduce_add_rms_norm: the norm of what ranks hold together, and the residual, on every rank alike."""

import pytest
import torch
from m3hal_conformance.ranks import run_ranks

from m3hal import ops
from m3hal.ops.add_rms_norm import add_rms_norm
from m3hal.ops.allreduce_add_rms_norm import allreduce_add_rms_norm, compose

NORM = {"eps": 1e-6, "weight_offset": 1.0}


def shares(ranks, dtype=torch.float64):
    """One share a rank, a residual and a weight."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(ranks + 1, 5, 64, generator=generator).to(dtype)
    return drawn[:-1], drawn[-1], torch.randn(64, generator=generator).to(dtype)


def on_ranks(x, *rest, call=allreduce_add_rms_norm, **options):
    return run_ranks(len(x), lambda group: call(x[group.rank], *rest, group, **options))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_it_is_the_sum_then_add_rms_norm(ranks):
    """In fp64 every rank has exactly what one device with the whole sum has, and no input is written."""
    x, residual, weight = shares(ranks)
    before = x.clone()
    wanted = add_rms_norm(sum(x[1:], start=x[0]), residual, weight, **NORM)
    for found in on_ranks(x, residual, weight, **NORM):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch.equal(x, before)


def test_shares_in_bf16_are_summed_in_fp32():
    """256 + 1 + 1 - 256 is 2: each 1 would be lost in bf16. The residual is rounded once."""
    x = torch.tensor([256.0, 1.0, 1.0, -256.0]).bfloat16().view(4, 1, 1).expand(4, 1, 64)
    residual, weight = torch.full((1, 64), 2.0**-7).bfloat16(), torch.zeros(64).bfloat16()
    exact = on_ranks(x, residual, weight, **NORM)[0]
    stepwise = on_ranks(x, residual, weight, **NORM, traits={"reduce_dtype": "bfloat16_stepwise"})[0]
    assert exact[1][0, 0] == 2.0 + 2.0**-7 or exact[1][0, 0] == 2.0  # the nearest of bf16's
    assert stepwise[1][0, 0] == 2.0**-7


@pytest.mark.parametrize("how", ["bfloat16", "bfloat16_stepwise"])
def test_reduce_dtype_changes_the_numbers_of_several_ranks_only(how):
    """One rank alone has nothing to round; of two the sum is rounded before the residual joins it."""
    for ranks in (1, 2):
        x, residual, weight = shares(ranks, torch.bfloat16)
        x, residual = x.float(), residual.float()
        exact = on_ranks(x, residual, weight, **NORM)[0]
        found = on_ranks(x, residual, weight, **NORM, traits={"reduce_dtype": how})[0]
        assert torch.equal(exact[1], found[1]) == (ranks == 1)
    assert torch.equal(found[1], (x[0] + x[1]).bfloat16().float() + residual)


def test_without_a_group_it_is_add_rms_norm():
    """None is one rank alone."""
    (x,), residual, weight = shares(1, torch.bfloat16)
    found, wanted = (f(x, residual, weight, **NORM) for f in (allreduce_add_rms_norm, add_rms_norm))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_composition_rounds_the_sum():
    """What the trait of compositions says: add_rms_norm takes a bf16 sum."""
    x, residual, weight = shares(3, torch.bfloat16)
    run = compose(add_rms_norm=lambda *inputs: add_rms_norm(*inputs, **NORM))
    composed = on_ranks(x, residual, weight, call=run)[1]
    declared = on_ranks(x, residual, weight, **NORM, traits=ops.load("allreduce_add_rms_norm").composed_traits)[1]
    assert all(torch.equal(a, b) for a, b in zip(composed, declared, strict=True))


def test_a_nan_of_one_rank_stays_in_its_row():
    """On every rank that row is NaN, and no other."""
    x, residual, weight = shares(3, torch.float32)
    x[1, 2, 7] = float("nan")
    for out, _ in on_ranks(x, residual, weight, **NORM):
        assert out.isnan().all(-1).tolist() == [False, False, True, False, False]
        assert not out[[0, 1, 3, 4]].isnan().any()
