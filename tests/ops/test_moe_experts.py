"""moe_experts: only the chosen experts count, each by its weight; the sum is fp32 and rounded once."""

import math

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows, worst_row
from m3hal_conformance.inputs import generator, hot_routing, tail_heavy

from m3hal.ops import ExpertWeights
from m3hal.ops.moe_experts import moe_experts

M3 = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
E, H, I = 8, 64, 48  # noqa: E741


def bank(dtype=torch.float32, experts=E):
    """Experts whose gates reach the limit and whose down projections differ in size."""
    rng = generator("moe/bank")
    size = 1.0 + torch.arange(experts)[:, None, None] / 4
    w13 = tail_heavy(experts, 2 * I, H, rng=rng) / H**0.5 * 3
    w2 = size * tail_heavy(experts, H, I, rng=rng) / I**0.5
    return ExpertWeights(w13.to(dtype), w2.to(dtype))


def tokens(count, dtype=torch.float32):
    x = tail_heavy(count, H, rng=generator("moe/x")).to(dtype)
    return (x, *hot_routing(count, E, 4, generator("moe/routing")))


def by_hand(x, weights, ids, experts):
    """One token and one expert at a time, in fp64."""
    out = torch.zeros(len(x), x.shape[1], dtype=torch.float64)
    for t, (row, ws, es) in enumerate(zip(x.double(), weights.double(), ids.tolist(), strict=True)):
        for w, e in zip(ws, es, strict=True):
            if e >= 0:
                up_gate = experts.w13[e].double() @ row
                gate = up_gate[:I].clamp(max=7.0)
                up = up_gate[I:].clamp(-7.0, 7.0)
                out[t] += w * (experts.w2[e].double() @ (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1.0)))
    return out


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-3)])
@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 65])
def test_against_one_expert_at_a_time(run, dtype, bound, count):
    """A hot expert, an empty one, and every order of ids."""
    x, weights, ids = tokens(count, dtype)
    experts = bank(dtype)
    assert_rows(run("moe_experts", x, weights, ids, experts, **M3), by_hand(x, weights, ids, experts), bound)


def test_minus_one_contributes_nothing(run):
    """A skipped token is exactly zero, although its weights and the last expert hold NaN."""
    x, weights, ids = tokens(3)
    experts = bank()
    clean = run("moe_experts", x, weights, ids, experts, **M3)
    experts.w13[-1] = experts.w2[-1] = math.nan
    ids[1] = -1
    weights[1] = math.nan
    out = run("moe_experts", x, weights, ids, experts, **M3)
    assert not out[1].any()
    assert_rows(out[[0, 2]], clean[[0, 2]], 1e-6)
    ids[0, 2] = -1
    weights[0, 2] = math.nan
    assert run("moe_experts", x, weights, ids, experts, **M3).isfinite().all()


def test_nobody_routed(run):
    """All ids -1, and no tokens at all, give zeros of the right shape."""
    x, weights, ids = tokens(4)
    out = run("moe_experts", x, weights, torch.full_like(ids, -1), bank(), **M3)
    assert out.shape == (4, H)
    assert not out.any()
    assert run("moe_experts", x[:0], weights[:0], ids[:0], bank(), **M3).shape == (0, H)


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_experts_sum_to_the_whole(run, ranks):
    """Each rank has its experts under local ids; a rank without a token returns zeros, and the sum is ep = 1."""
    x, weights, ids = tokens(24)
    ids = ids % 4  # ranks above have no token
    experts, share = bank(), E // ranks
    parts = []
    for rank in range(ranks):
        local = ids - rank * share
        local = torch.where((local >= 0) & (local < share), local, -1)
        mine = ExpertWeights(experts.w13[rank * share :][:share], experts.w2[rank * share :][:share])
        parts.append(run("moe_experts", x, weights, local, mine, **M3))
    assert not parts[-1].any()
    assert_rows(sum(parts), run("moe_experts", x, weights, ids, experts, **M3), 2e-6)


def test_all_tokens_on_one_expert(run):
    """512 tokens on expert 3 is one MLP."""
    x = tail_heavy(512, H, rng=generator("moe/one"))
    ids, weights = torch.full((512, 1), 3, dtype=torch.int32), torch.full((512, 1), 1.5)
    assert_rows(run("moe_experts", x, weights, ids, bank(), **M3), by_hand(x, weights, ids, bank()), 2e-6)


def test_an_expert_chosen_twice_counts_twice(run):
    """Weights of a repeated id add up."""
    x, _, _ = tokens(2)
    twice = run(
        "moe_experts", x, torch.tensor([[0.5, 0.25]] * 2), torch.full((2, 2), 5, dtype=torch.int32), bank(), **M3
    )
    once = run("moe_experts", x, torch.full((2, 1), 0.75), torch.full((2, 1), 5, dtype=torch.int32), bank(), **M3)
    assert_rows(twice, once, 1e-6)


def test_the_scale_is_in_the_weights_and_nowhere_else(run):
    """Experts that return their input, with weights that sum to 2, return twice the input."""
    gate, up = 1.0, 0.5
    unit = gate / (1 + math.exp(-1.702 * gate)) * (up + 1.0)
    w13 = torch.tensor([[gate], [up]]).repeat_interleave(H, 0) * torch.eye(H).repeat(2, 1)
    experts = ExpertWeights(w13.expand(E, -1, -1), (torch.eye(H) / unit).expand(E, -1, -1))
    _, weights, ids = tokens(6)
    out = run("moe_experts", torch.ones(6, H), weights, ids, experts, **M3)
    torch.testing.assert_close(out, torch.full((6, H), 2.0), rtol=1e-6, atol=0)


def test_halves_not_pairs(run):
    """w13's first half is the gate: projections [1, 2 | 3, 4] give the numbers of swiglu_oai."""
    w13 = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None] * torch.tensor([1.0, 0.0])
    experts = ExpertWeights(w13[None], torch.eye(2)[None])
    ids = torch.zeros(1, 1, dtype=torch.int32)
    out = run("moe_experts", torch.ones(1, 2), torch.ones(1, 1), ids, experts, **M3)
    torch.testing.assert_close(out, torch.tensor([[3.383183, 9.678293]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 63, 65])
def test_a_row_does_not_depend_on_its_batch(count):
    """A token among others is the token alone, up to the order of fp32 sums."""
    x, weights, ids = tokens(65)
    assert_row_alone(
        lambda rows: moe_experts(x[list(rows)], weights[list(rows)], ids[list(rows)], bank(), **M3),
        count,
        rows=[0, count - 1],
        bound=1e-6,
    )


def test_strided_tokens(run):
    """A slice of wider rows and a transposed bank."""
    x, weights, ids = tokens(5)
    wide = torch.cat([x, x], -1)[:, :H]
    experts = bank()
    turned = ExpertWeights(experts.w13.mT.contiguous().mT, experts.w2.mT.contiguous().mT)
    assert_rows(run("moe_experts", wide, weights, ids, turned, **M3), by_hand(x, weights, ids, experts), 2e-6)


def test_bf16_combination_is_emulated(run, exact):
    """Summing in bf16 costs more than one rounding at the end, and stays near."""
    x, weights, ids = tokens(65, torch.bfloat16)
    experts = bank(torch.bfloat16)
    oracle = exact("moe_experts", x, weights, ids, experts, **M3)
    once = worst_row(run("moe_experts", x, weights, ids, experts, **M3), oracle).error
    often = worst_row(
        run("moe_experts", x, weights, ids, experts, **M3, traits={"combine_dtype": "bfloat16"}), oracle
    ).error
    assert once < often < 1e-2


def test_an_unknown_expert_is_refused():
    """An id beyond this rank's experts is an error, not somebody else's memory."""
    x, weights, ids = tokens(1)
    ids[0, 0] = E
    with pytest.raises(IndexError):
        moe_experts(x, weights, ids, bank(), **M3)
