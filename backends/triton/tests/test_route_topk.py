"""The choice of experts against the definition, exactly."""

from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, poisoned
from m3hal_triton.route_topk import route_topk
from machine_cases import site as real_site

from m3hal.ops import load


def _routed(logits, bias, forced=None, **values):
    """What the kernel gives over poison, and the definition, after the ids were found equal."""
    site = replace(real_site("moe", "bfloat16"), num_experts=logits.shape[1], **values)
    op, k = load("route_topk"), site.top_k_experts
    weights = poisoned(len(logits), k, dtype=torch.float32)
    ids = torch.full((len(logits), k), 77, dtype=torch.int32, device=DEVICE)
    route_topk(site)(logits, bias, forced, out=(weights, ids))
    wanted, wanted_ids = op.reference(logits, bias, forced, **op.static_values(site))
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(weights, wanted, rtol=2e-6, atol=0)
    return weights, ids


@pytest.mark.parametrize(("experts", "k"), [(128, 4), (4, 4), (8, 3), (200, 5), (1024, 8)])
def test_ties_nan_and_infinities(experts, k):
    """Few distinct scores, rows of NaN, of infinities, and rows with fewer numbers than k, in a strided view."""
    generator = torch.Generator().manual_seed(experts)
    wide = torch.randint(-2, 3, (11, experts, 2), generator=generator).float()
    wide[1], wide[2, ::2], wide[3] = float("nan"), float("nan"), -300.0
    wide[4, 2:], wide[5, 1:], wide[6, 0] = float("-inf"), float("nan"), float("inf")
    bias = torch.randint(0, 3, (experts,), generator=generator).float() * 0.125
    _routed(wide.to(DEVICE)[..., 0], bias.to(DEVICE), top_k_experts=k)


@pytest.mark.parametrize(("renormalize", "scale"), [(True, 2.0), (False, 1.5)])
def test_weights(renormalize, scale):
    """From the sigmoid alone, whatever the bias; zeros where their sum is zero."""
    logits = torch.randn(7, 32, device=DEVICE)
    logits[3] = -300
    weights, _ = _routed(
        logits, 3 * torch.rand(32, device=DEVICE), top_k_experts=4, renormalize=renormalize, routed_scale=scale
    )
    assert not weights[3].any()
    if renormalize:
        assert torch.allclose(weights.sum(-1), torch.where(torch.arange(7, device=DEVICE) == 3, 0.0, scale))


def test_replayed_rows():
    """A row with an id takes its own, repeated ones and -1 among them; other rows choose."""
    forced = torch.tensor([[3, 1, 7, 0], [-1, -1, -1, -1], [5, 5, -1, 2], [-1, 6, -1, -1], [-1] * 4])
    logits = torch.randn(5, 16)
    logits[0, 3], logits[2, 5] = float("nan"), -300.0
    wide = torch.stack([forced, torch.full_like(forced, 9)], -1).int().to(DEVICE)
    _routed(logits.to(DEVICE), torch.rand(16, device=DEVICE), wide[..., 0])


def test_no_tokens():
    """Zero tokens give empty results."""
    weights, ids = route_topk(real_site("moe", "bfloat16"))(
        torch.empty(0, 128, device=DEVICE), torch.empty(128, device=DEVICE)
    )
    assert weights.shape == ids.shape == (0, 4)
