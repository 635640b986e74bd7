"""moe_experts with adapters: the delta of the first product comes before the activation, both under the weight."""

from dataclasses import replace

import pytest
import torch
from m3hal_conformance import assert_rows
from m3hal_conformance.inputs import generator, hot_routing

from m3hal.ops import ExpertLoRA, ExpertWeights
from m3hal.ops.moe_experts import moe_experts

M3 = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
E, H, I, L = 8, 64, 32, 3  # noqa: E741


def batch(rank, dtype=torch.float32, count=17):
    rng = generator(f"lora/{rank}")

    def draw(*shape):
        return (torch.randn(*shape, generator=rng) * shape[-1] ** -0.5).to(dtype)

    experts = ExpertWeights(2 * draw(E, 2 * I, H), draw(E, H, I))
    adapters = (torch.arange(count) % (L + 1) - 1).int()
    factors = draw(L, E, rank, H), draw(L, E, 2 * I, rank), draw(L, E, rank, I), draw(L, E, H, rank)
    lora = ExpertLoRA(*factors, torch.tensor([0.5, 2.0, 1.0]), adapters)
    return draw(count, H) * 8, *hot_routing(count, E, 4, rng), experts, lora


def merged(experts, lora, adapter):
    """The experts with one adapter merged into their weights, in fp64."""
    scale = lora.scales[adapter].double()
    w13 = experts.w13.double() + scale * lora.b13[adapter].double() @ lora.a13[adapter].double()
    return ExpertWeights(w13, experts.w2.double() + scale * lora.b2[adapter].double() @ lora.a2[adapter].double())


@pytest.mark.parametrize("rank", [1, 5, 32])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-3)])
def test_it_is_the_merged_weights(run, exact, dtype, bound, rank):
    """Each token's result is that of weights with its adapter merged into them; without one, of the weights."""
    x, weights, ids, experts, lora = batch(rank, dtype)
    out = run("moe_experts", x, weights, ids, experts, lora, **M3)
    for adapter in range(-1, L):
        rows = lora.adapters == adapter
        own = experts if adapter < 0 else merged(experts, lora, adapter)
        assert_rows(out[rows], exact("moe_experts", x[rows], weights[rows], ids[rows], own, **M3), bound)


def test_nobody_adapted_is_no_lora(run):
    """-1 for every token gives the bits of a call without, although the adapters hold NaN."""
    x, weights, ids, experts, lora = batch(5)
    nan = replace(lora, **{name: torch.full_like(getattr(lora, name), float("nan")) for name in ("a13", "b2")})
    nobody = replace(nan, adapters=torch.full_like(lora.adapters, -1))
    without = run("moe_experts", x, weights, ids, experts, **M3)
    assert torch.equal(run("moe_experts", x, weights, ids, experts, nobody, **M3), without)


def test_an_absent_expert_has_no_adapter_either(run):
    """id -1 contributes nothing to a token that has an adapter."""
    x, weights, ids, experts, lora = batch(5)
    out = run("moe_experts", x, weights, torch.full_like(ids, -1), experts, lora, **M3)
    assert not out.any()


def test_the_shared_expert_has_no_adapter():
    """Adapters belong to routed experts: the shared one adds the same for every token."""
    x, weights, ids, experts, lora = batch(5)
    shared = ExpertWeights(experts.w13[:1], experts.w2[:1])
    adapted = moe_experts(x, weights, ids, replace(experts, shared=shared), lora, **M3)
    alone = moe_experts(x, weights, torch.full_like(ids, -1), replace(experts, shared=shared), **M3)
    assert_rows(adapted, (moe_experts(x, weights, ids, experts, lora, **M3) + alone).double(), 2e-6)


def test_adapters_take_what_came_before_rounding():
    """With quantised activations the additions take the unrounded inputs of their products."""
    x, weights, ids, experts, lora = batch(5)
    none = ExpertWeights(torch.zeros_like(experts.w13), torch.zeros_like(experts.w2))
    plain = moe_experts(x, weights, ids, none, lora, **M3)
    assert torch.equal(plain, moe_experts(x, weights, ids, none, lora, **M3, traits={"activation_format": "mxfp4"}))
