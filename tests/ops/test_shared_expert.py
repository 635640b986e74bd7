"""moe_experts with a shared expert: every token takes it once, with weight 1, before the one rounding."""

from dataclasses import replace

import pytest
import torch
from m3hal_conformance import assert_rows
from m3hal_conformance.inputs import generator, hot_routing, tail_heavy

from m3hal import formats
from m3hal.formats import QTensor, spec_of
from m3hal.ops import ExpertWeights
from m3hal.ops.moe_experts import moe_experts

M3 = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
E, H, I, IS = 8, 64, 32, 96  # noqa: E741


def bank(dtype=torch.float32, shared_format=""):
    rng = generator("shared/bank")
    own = ExpertWeights(tail_heavy(1, 2 * IS, H, rng=rng) / 4, tail_heavy(1, H, IS, rng=rng) / 4)
    own = ExpertWeights(own.w13.to(dtype), own.w2.to(dtype))
    if shared_format:
        own = ExpertWeights(*(formats.quantize(w.float(), spec_of(shared_format)) for w in (own.w13, own.w2)))
    w13, w2 = tail_heavy(E, 2 * I, H, rng=rng) / 4, tail_heavy(E, H, I, rng=rng) / 4
    return ExpertWeights(w13.to(dtype), w2.to(dtype), shared=own)


def tokens(count, dtype=torch.float32):
    return (tail_heavy(count, H, rng=generator("shared/x")).to(dtype), *hot_routing(count, E, 4, generator("shared/r")))


def mlp(x, w13, w2):
    """One MLP in fp64, from the model's formula."""
    plain = [formats.dequantize(w) if isinstance(w, QTensor) else w for w in (w13, w2)]
    gate, up = (x.double() @ plain[0][0].double().T).chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1.0)) @ plain[1][0].double().T


@pytest.mark.parametrize("format", ["", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-3)])
def test_it_is_added_once_and_not_scaled(run, exact, dtype, bound, format):
    """The routed sum plus one MLP of every token, whatever the routing weights are; in a format of its own."""
    x, weights, ids = tokens(17, dtype)
    experts = bank(dtype, format)
    routed = exact("moe_experts", x, weights, ids, replace(experts, shared=None), **M3)
    wanted = routed + mlp(x, experts.shared.w13, experts.shared.w2)
    assert_rows(run("moe_experts", x, weights, ids, experts, **M3), wanted, bound)
    zeros = run("moe_experts", x, torch.zeros_like(weights), ids, experts, **M3)
    assert_rows(zeros, mlp(x, experts.shared.w13, experts.shared.w2), bound)


def test_a_token_without_an_expert_takes_it(run):
    """ids of -1 with weights of NaN leave the shared expert alone."""
    x, weights, ids = tokens(5)
    out = run("moe_experts", x, torch.full_like(weights, float("nan")), torch.full_like(ids, -1), bank(), **M3)
    assert_rows(out, mlp(x, bank().shared.w13, bank().shared.w2), 2e-6)


def test_one_rounding():
    """In bf16 the sum is rounded, not its two parts."""
    x, weights, ids = tokens(65, torch.bfloat16)
    experts = bank(torch.bfloat16)
    whole = moe_experts(x, weights, ids, experts, **M3)
    wide = [t.float() if t.is_floating_point() else t for t in (x, weights, ids)]
    assert torch.equal(whole, moe_experts(*wide, experts, **M3).bfloat16())
    parts = moe_experts(x, weights, ids, replace(experts, shared=None), **M3) + moe_experts(
        x, weights, torch.full_like(ids, -1), experts, **M3
    )
    assert not torch.equal(whole, parts)


def test_one_rank_of_several_holds_it(run):
    """Ranks that add up: one has it, or each a slice of its inner dimension."""
    x, weights, ids = tokens(9)
    experts = bank()
    whole = run("moe_experts", x, weights, ids, experts, **M3)

    def rank(number, shared):
        local = torch.where(ids // 4 == number, ids % 4, -1)
        mine = ExpertWeights(experts.w13[4 * number :][:4], experts.w2[4 * number :][:4], shared=shared)
        return run("moe_experts", x, weights, local, mine, **M3)

    gate, up = experts.shared.w13.chunk(2, 1)
    half = [
        ExpertWeights(torch.cat([gate[:, part], up[:, part]], 1), experts.shared.w2[..., part])
        for part in (slice(0, 40), slice(40, IS))
    ]
    assert_rows(rank(0, experts.shared) + rank(1, None), whole, 2e-6)
    assert_rows(rank(0, half[0]) + rank(1, half[1]), whole, 2e-6)


def test_its_activations_have_a_format_of_their_own():
    """``shared_activation_format`` rounds what its products take, ``activation_format`` does not."""
    x, weights, ids = tokens(9)
    experts, nobody = bank(shared_format="mxfp8"), torch.full_like(ids, -1)
    plain = moe_experts(x, weights, nobody, experts, **M3)
    same = moe_experts(x, weights, nobody, experts, **M3, traits={"activation_format": "nvfp4"})
    other = moe_experts(x, weights, nobody, experts, **M3, traits={"shared_activation_format": "mxfp8"})
    assert torch.equal(plain, same)
    error = float((plain - other).norm() / plain.norm())
    assert 1e-3 < error < 0.1
