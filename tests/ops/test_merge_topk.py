"""merge_topk: the choice over shards is the choice over the whole, exactly."""

import math

import pytest
import torch
from m3hal_conformance.inputs import generator

from m3hal.ops.topk_blocks import topk_blocks

NAN = math.nan


def offers(scores, visible, ranks, k, rng):
    """What each shard offers: its own k best by (score, id), in any order; block b belongs to rank b % ranks."""
    tokens, heads, _ = scores.shape
    ids = torch.full((ranks, tokens, heads, k), -1, dtype=torch.int32)
    offered = torch.full((ranks, tokens, heads, k), NAN)  # of absent offers too
    for rank in range(ranks):
        for t in range(tokens):
            for h in range(heads):
                row = scores[t, h].tolist()
                own = [b for b in range(int(visible[t])) if b % ranks == rank]
                own.sort(key=lambda b, row=row: (math.isnan(row[b]), 0.0 if math.isnan(row[b]) else -row[b], b))
                best = own[:k]
                order = torch.randperm(k, generator=rng)[: len(best)]
                ids[rank, t, h, order] = torch.tensor(best, dtype=torch.int32)
                offered[rank, t, h, order] = torch.tensor([row[b] for b in best])
    return offered, ids


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("forced", [(0, 1), (1, 2), (0, 0)])
@pytest.mark.parametrize("ties", [False, True])
def test_merged_is_whole(run, ranks, forced, ties):
    """Rows from padded to many blocks, shards with few or no candidates, heavy ties, NaN and infinities."""
    rng = generator(f"merge/{ranks}/{forced}/{ties}")
    visible = torch.tensor([0, 1, 2, 3, 4, 5, 15, 16, 17, 40], dtype=torch.int32)
    scores = torch.randn(10, 2, 40, generator=rng)
    if ties:
        scores = scores.round().clamp(-1, 1)
    scores[9, 0, 3:30:4] = NAN
    scores[9, 1, :8] = math.inf
    scores[8, 0] = -math.inf
    statics = {"top_k_blocks": 4, "init_blocks": forced[0], "local_blocks": forced[1]}
    merged = run("merge_topk", *offers(scores, visible, ranks, 4, rng), visible, **statics)
    assert torch.equal(merged, topk_blocks(scores, visible, **statics))


def test_the_order_of_shards_does_not_matter(run):
    """Equal scores go by id, not by who offered them."""
    rng = generator("merge/order")
    scores, visible = torch.zeros(1, 1, 30), torch.tensor([30], dtype=torch.int32)
    offered, ids = offers(scores, visible, 4, 4, rng)
    statics = {"top_k_blocks": 4, "init_blocks": 0, "local_blocks": 1}
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        assert run("merge_topk", offered[order], ids[order], visible, **statics).tolist() == [[[0, 1, 2, 29]]]


def test_forced_blocks_come_unasked(run):
    """A shard that dropped a forced block for its score does not lose it; an offer past the end is no offer."""
    ids = torch.tensor([[[[3, 4, 9]]], [[[5, -1, 2]]]], dtype=torch.int32)
    scores = torch.tensor([[[[1.0, 2.0, 99.0]]], [[[0.5, math.inf, 0.1]]]])
    visible = torch.tensor([8], dtype=torch.int32)
    out = run("merge_topk", scores, ids, visible, top_k_blocks=4, init_blocks=1, local_blocks=1)
    assert out.tolist() == [[[0, 3, 4, 7]]]


def test_padded_rows_and_no_tokens(run):
    """A padded row is all -1, whatever was offered; zero tokens give zero rows."""
    ids = torch.zeros(2, 1, 3, 4, dtype=torch.int32)
    scores = torch.ones(2, 1, 3, 4)
    statics = {"top_k_blocks": 4, "init_blocks": 1, "local_blocks": 1}
    assert run("merge_topk", scores, ids, torch.zeros(1, dtype=torch.int32), **statics).eq(-1).all()
    none = torch.zeros(0, dtype=torch.int32)
    assert run("merge_topk", scores[:, :0], ids[:, :0], none, **statics).shape == (0, 3, 4)


def test_strided_offers(run):
    """A gathered buffer seen through a transpose."""
    rng = generator("merge/strided")
    scores, visible = torch.randn(3, 2, 20, generator=rng), torch.tensor([20, 9, 2], dtype=torch.int32)
    offered, ids = offers(scores, visible, 2, 4, rng)
    views = [part.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3) for part in (offered, ids)]
    statics = {"top_k_blocks": 4, "init_blocks": 0, "local_blocks": 1}
    assert torch.equal(run("merge_topk", *views, visible, **statics), topk_blocks(scores, visible, **statics))
