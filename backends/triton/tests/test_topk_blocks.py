"""The choice of blocks against the definition, exactly."""

from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, sparse_site
from m3hal_triton.topk_blocks import merge_topk, topk_blocks

from m3hal.ops import load


def _site(k, init, local):
    return replace(sparse_site(torch.float32), top_k_blocks=k, init_blocks=init, local_blocks=local)


def _scores(*shape, seed=0):
    """Few distinct values, so that ties abound; with signed zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, shape, generator=generator) * 0.5
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
    where = torch.rand(shape, generator=generator)
    scores = torch.where(where < 0.12, special[(where * 33).long().clamp(max=3)], scores)
    return scores.float().to(DEVICE)


@pytest.mark.parametrize(("k", "init", "local"), [(4, 0, 1), (16, 1, 2), (5, 2, 3)])
def test_ties_nan_and_forced_blocks(k, init, local):
    """Every visible count from none to all, over scores full of ties, NaN and infinities."""
    site, op = _site(k, init, local), load("topk_blocks")
    scores = _scores(24, 3, 23)
    visible = torch.arange(24, dtype=torch.int32, device=DEVICE)
    scores[torch.arange(23, device=DEVICE) >= visible[:, None, None].expand(-1, 3, 23)] = float("nan")
    out = torch.full((24, 3, k), 77, dtype=torch.int32, device=DEVICE)
    topk_blocks(site)(scores, visible, out=out)
    assert torch.equal(out, op.reference(scores, visible, **op.static_values(site)))


@pytest.mark.parametrize("blocks", [64, 130, 300])
def test_many_blocks_go_by_groups(blocks):
    """Groups of blocks first: ties across and within groups, forced blocks, and a last group that is not full."""
    site, op = _site(4, 1, 2), load("topk_blocks")
    scores = _scores(5, 2, blocks, seed=2)
    visible = torch.tensor([blocks, blocks - 3, 33, 9, 2], dtype=torch.int32, device=DEVICE)
    out = topk_blocks(site)(scores, visible)
    assert torch.equal(out, op.reference(scores, visible, **op.static_values(site)))


@pytest.mark.parametrize(("k", "init", "local"), [(16, 0, 1), (16, 1, 2), (3, 0, 3), (40, 0, 0)])
@pytest.mark.parametrize("blocks", [512, 1500, 4096])
def test_rows_of_several_warps(blocks, k, init, local):
    """Distinct scores, ties, scores of one sign, NaN, -inf, rows that end early: no score is missed."""
    site, op = _site(k, init, local), load("topk_blocks")
    scores = torch.randn(6, 2, blocks, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    scores[1] = _scores(2, blocks, seed=5)
    scores[2] = -scores[2].abs()
    scores[3, :, ::7] = float("nan")
    scores[4] = 0
    scores[5] = float("-inf")
    scores[5, 0, :5] = 3
    for last in (blocks, blocks // 2, 17, 1, 0):
        visible = torch.tensor([blocks, blocks, blocks - 3, blocks, last, last], dtype=torch.int32, device=DEVICE)
        out = torch.full((6, 2, k), 77, dtype=torch.int32, device=DEVICE)
        topk_blocks(site)(scores, visible, out=out)
        assert torch.equal(out, op.reference(scores, visible, **op.static_values(site)))


def test_random_scores_and_strides():
    """Distinct scores of both signs and all magnitudes, in a transposed buffer."""
    site, op = _site(8, 0, 1), load("topk_blocks")
    scores = (torch.randn(37, 2, 6).exp() * torch.randn(37, 2, 6).sign()).to(DEVICE).permute(2, 1, 0)
    visible = torch.tensor([37, 36, 9, 8, 1, 0], dtype=torch.int32, device=DEVICE)
    out = topk_blocks(site)(scores, visible)
    assert torch.equal(out, op.reference(scores, visible, **op.static_values(site)))


@pytest.mark.parametrize(("init", "local"), [(0, 1), (1, 2)])
def test_merge_over_shards(init, local):
    """Offers in any order, absent ones, forced blocks that nobody offered."""
    site, op = _site(4, init, local), load("merge_topk")
    shards, tokens, heads, blocks = 3, 12, 2, 18
    scores = _scores(shards, tokens, heads, 4, seed=1)
    order = torch.rand(tokens, heads, blocks).argsort(-1)[..., : shards * 4].int()
    ids = order.view(tokens, heads, shards, 4).permute(2, 0, 1, 3).to(DEVICE)
    ids = torch.where(torch.rand(ids.shape, device=DEVICE) < 0.2, -1, ids)
    visible = torch.tensor([0, 1, 2, 3, 5, 8, 13, 15, 16, 17, 18, 18], dtype=torch.int32, device=DEVICE)
    out = merge_topk(site)(scores, ids, visible)
    assert torch.equal(out, op.reference(scores, ids, visible, **op.static_values(site)))


def test_no_tokens():
    """Zero tokens give an empty result."""
    site = _site(4, 0, 1)
    empty = torch.empty(0, 2, 9, device=DEVICE)
    assert topk_blocks(site)(empty, torch.empty(0, dtype=torch.int32, device=DEVICE)).shape == (0, 2, 4)
