"""topk_blocks: ascending ids, -1 tail, ties to the lower id, NaN last, forced by set."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from m3hal_conformance import assert_row_alone
from m3hal_conformance.inputs import generator

from m3hal.ops.topk_blocks import topk_blocks

M3 = {"top_k_blocks": 16, "init_blocks": 0, "local_blocks": 1}


def by_hand(scores, visible, k, init, local):
    """The rules for one row, in plain Python."""
    forced = {b for b in range(visible) if b < init or b >= visible - local}
    free = [b for b in range(visible) if b not in forced]
    free.sort(key=lambda b: (math.isnan(scores[b]), 0.0 if math.isnan(scores[b]) else -scores[b], b))
    chosen = sorted([*forced, *free[: k - len(forced)]])
    return chosen + [-1] * (k - len(chosen))


def check(run, scores, visible, **statics):
    out = run("topk_blocks", scores, visible, **statics)
    rule = statics["top_k_blocks"], statics["init_blocks"], statics["local_blocks"]
    expected = [
        [by_hand(head, v, *rule) for head in row] for row, v in zip(scores.tolist(), visible.tolist(), strict=True)
    ]
    assert out.tolist() == expected
    return out


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("visible", [0, 1, 2, 15, 16, 17, 129])
def test_few_and_many_blocks(run, visible):
    """Fewer blocks than k: all of them once, then -1; a padded row: all -1; what is not visible has the best scores."""
    scores = torch.randn(1, 4, 130, generator=generator("topk/few"))
    scores[..., visible:] = 1e30
    out = check(run, scores, int32(visible), **M3)
    assert (out >= 0).sum(-1).eq(min(visible, 16)).all()


def test_ties_go_to_the_lower_id(run):
    """Every rank must keep the same blocks: 64 equal scores."""
    out = check(run, torch.ones(3, 2, 64), int32(64, 64, 20), **M3)
    assert out[0, 0].tolist() == [*range(15), 63]
    assert out[2, 0].tolist() == [*range(15), 19]


def test_the_newest_block_is_forced_by_set(run):
    """The worst score, NaN, or a rival's 1e30 or inf: the newest visible block is in, and never twice."""
    for worst in (-1e38, -math.inf, math.nan):
        scores = torch.full((1, 1, 40), 1e30)
        scores[0, 0, :20] = math.inf
        scores[0, 0, 29] = worst
        out = check(run, scores, int32(30), **M3)
        assert out[0, 0].tolist() == [*range(15), 29]


def test_nan_loses_to_everything(run):
    """NaN blocks come after -inf ones, and only when there is room."""
    scores = torch.full((1, 1, 20), -math.inf)
    scores[0, 0, 2:6] = math.nan
    assert check(run, scores, int32(20), **M3)[0, 0].tolist() == [0, 1, *range(6, 20)]
    scores[0, 0, :18] = math.nan
    assert check(run, scores, int32(20), **M3)[0, 0].tolist() == [*range(14), 18, 19]
    check(run, torch.full((2, 2, 20), math.nan), int32(20, 7), **M3)


def test_forced_sets(run):
    """First and last blocks, overlapping where few are visible; none forced; all forced."""
    scores = torch.randn(6, 2, 12, generator=generator("topk/forced"))
    visible = int32(0, 1, 2, 3, 5, 12)
    for init, local, k in ((1, 2, 4), (2, 0, 4), (0, 0, 4), (1, 3, 4), (0, 1, 1)):
        check(run, scores, visible, top_k_blocks=k, init_blocks=init, local_blocks=local)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_row(data):
    """Rows of few distinct values, infinities and NaN, against the rules in plain Python."""
    blocks, k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    init = data.draw(st.integers(0, k))
    local = data.draw(st.integers(0, k - init))
    value = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1.0, 1e30, math.inf, math.nan])
    row = data.draw(st.lists(value, min_size=blocks, max_size=blocks))
    visible = data.draw(st.integers(0, blocks))
    out = topk_blocks(torch.tensor([[row]]), int32(visible), top_k_blocks=k, init_blocks=init, local_blocks=local)
    assert out[0, 0].tolist() == by_hand(row, visible, k, init, local)


def test_a_million_tokens(run):
    """8,192 blocks and more, with the winners far out."""
    scores = torch.randn(1, 1, 8200, generator=generator("topk/wide"))
    check(run, scores, int32(8197), **M3)


def test_strided_scores_and_no_tokens(run):
    """A head-major buffer seen token-major; zero tokens."""
    scores = torch.randn(2, 5, 40, generator=generator("topk/strided")).transpose(0, 1)
    check(run, scores, int32(40, 3, 0, 17, 33), **M3)
    assert run("topk_blocks", scores[:0], int32(), **M3).shape == (0, 2, 16)
    assert run("topk_blocks", torch.empty(2, 1, 0), int32(0, 0), **M3).eq(-1).all()


def test_refusals():
    """More visible blocks than scores, or more forced ones than k, can't be served."""
    with pytest.raises(ValueError, match="sees 9 blocks, but only 8 have scores"):
        topk_blocks(torch.zeros(1, 1, 8), int32(9), **M3)
    with pytest.raises(ValueError, match=r"init_blocks \(1\) and local_blocks \(2\)"):
        topk_blocks(torch.zeros(1, 1, 8), int32(8), top_k_blocks=2, init_blocks=1, local_blocks=2)


def test_a_row_does_not_depend_on_its_batch():
    """The same ids alone and among others."""
    scores, visible = torch.randn(6, 2, 40, generator=generator("topk/rows")), int32(40, 3, 0, 17, 33, 16)
    assert_row_alone(lambda rows: topk_blocks(scores[list(rows)], visible[list(rows)], **M3), 6)
