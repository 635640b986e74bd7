"""mega_moe: experts that are spread over ranks give what one device with all of them gives."""

from dataclasses import replace

import pytest
import torch
from m3hal_conformance import assert_ulp
from m3hal_conformance.ranks import run_ranks

from m3hal.ops import ExpertWeights
from m3hal.ops.mega_moe import mega_moe
from m3hal.ops.moe_experts import moe_experts

EXPERTS, H, INNER, K = 8, 12, 6, 3
ACTIVATION = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
NAN = float("nan")


def bank(dtype=torch.float64):
    """All experts and a shared one."""
    generator = torch.Generator().manual_seed(5)

    def drawn(count):
        shapes = (count, 2 * INNER, H), (count, H, INNER)
        return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]

    return ExpertWeights(*drawn(EXPERTS), shared=ExpertWeights(*drawn(1)))


def tokens(counts, dtype=torch.float64):
    """x, weights, ids of each rank; absent choices weigh NaN."""
    generator = torch.Generator().manual_seed(6)
    made = []
    for count in counts:
        ids = torch.randint(-1, EXPERTS, (count, K), generator=generator, dtype=torch.int32)
        weights = torch.rand(count, K, generator=generator).masked_fill(ids < 0, NAN)
        made.append((torch.randn(count, H, generator=generator).to(dtype), weights, ids))
    return made


def spread(experts, given, **options):
    """Each rank's result, with its slice of the experts."""
    local = EXPERTS // len(given)

    def call(group):
        own = slice(group.rank * local, (group.rank + 1) * local)
        mine = replace(experts, w13=experts.w13[own], w2=experts.w2[own])
        return mega_moe(*given[group.rank], mine, group, num_local_experts=local, **ACTIVATION, **options)

    return run_ranks(len(given), call)


def whole(experts, given):
    x, weights, ids = (torch.cat(parts) for parts in zip(*given, strict=True))
    return moe_experts(x, weights, ids, experts, **ACTIVATION)


@pytest.mark.parametrize("counts", [(7,), (4, 4), (5, 0, 3, 1), (0, 0), (0, 2, 0, 0, 3, 1, 0, 1)], ids=str)
def test_it_equals_one_device(counts):
    """Whatever number of ranks and of tokens on each: in fp64 to the last digits, the shared expert included."""
    experts, given = bank(), tokens(counts)
    found = spread(experts, given)
    assert [len(out) for out in found] == list(counts)
    torch.testing.assert_close(torch.cat(found), whole(experts, given), rtol=1e-13, atol=1e-13)


def test_it_rounds_once():
    """Of bf16 inputs each number is within half a last place of the exact one: neither shares nor sums are rounded."""
    experts, given = bank(torch.bfloat16), tokens((5, 0, 3, 1), torch.bfloat16)
    wide = [(x.double(), weights, ids) for x, weights, ids in given]
    assert_ulp(torch.cat(spread(experts, given)), whole(experts, wide), 0.51)


def test_the_shared_expert_is_added_once():
    """A token without a routed expert gets the shared one, once, however many ranks there are; without one, zeros."""
    experts = bank()
    given = [(x, w, torch.full_like(ids, -1)) for x, w, ids in tokens((2, 3))]
    found, without = torch.cat(spread(experts, given)), torch.cat(spread(replace(experts, shared=None), given))
    torch.testing.assert_close(found, whole(experts, given), rtol=1e-13, atol=1e-13)
    assert not without.any()


def test_shares_that_are_rounded():
    """reduce_dtype rounds what each rank gives for a token, and nothing else."""
    experts, given = replace(bank(torch.float32), shared=None), tokens((3, 2), torch.float32)
    exact, rounded = spread(experts, given), spread(experts, given, traits={"reduce_dtype": "bfloat16"})
    error = (torch.cat(rounded) - torch.cat(exact)).norm() / torch.cat(exact).norm()
    assert 2**-12 < error < 2**-8


def test_a_nan_token_stays_alone():
    """No other token notices, on its rank or another."""
    experts, given = bank(), tokens((3, 2))
    right = spread(experts, given)
    given[0][0][1] = NAN
    found = spread(experts, given)
    assert found[0][1].isnan().all()
    assert torch.equal(found[0][[0, 2]], right[0][[0, 2]])
    assert torch.equal(found[1], right[1])
