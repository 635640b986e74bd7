"""route_topk: the bias chooses and never weighs; k distinct experts whatever the logits; ties to the lower id."""

import math

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows
from m3hal_conformance.inputs import generator

from m3hal.ops.route_topk import route_topk

M3 = {"top_k_experts": 4, "renormalize": True, "routed_scale": 2.0}


def by_hand(logits, bias, k):
    """The rules in plain Python: ids by (choice descending, id ascending), NaN last, and the weights."""
    score = [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in logits]
    choice = [s + b for s, b in zip(score, bias, strict=True)]
    ids = sorted(
        range(len(logits)), key=lambda e: (math.isnan(choice[e]), -choice[e] if choice[e] == choice[e] else 0, e)
    )
    ids = ids[:k]
    weights = [0.0 if math.isnan(score[e]) else score[e] for e in ids]
    total = sum(weights)
    return ids, [2.0 * w / total if total else 0.0 for w in weights]


def check(run, logits, bias):
    weights, ids = run("route_topk", logits, bias, **M3)
    expected = [by_hand(row, bias.tolist(), 4) for row in logits.tolist()]
    assert ids.tolist() == [ids for ids, _ in expected]
    assert_rows(weights, torch.tensor([w for _, w in expected], dtype=torch.float64).reshape(weights.shape), 1e-6)


def test_the_bias_decides_who_and_not_how_much(run):
    """Published numbers: weights from the biased score, or no bias at all, give others."""
    logits = torch.tensor([[2.0, 1, 0, -1, -2, -3, -4, -5]])
    bias = torch.tensor([0, 0, 0, 0, 0.9, 0.8, 0.7, 0.6])
    weights, ids = run("route_topk", logits, bias, **M3)
    by_id = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert by_id == pytest.approx({0: 0.990503, 1: 0.822114, 4: 0.134050, 5: 0.053333}, rel=1e-5)
    check(run, logits, bias)


@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_many_rows_with_ties(run, tokens):
    """Logits of few distinct values and a bias of few, so that ties are everywhere; 128 experts."""
    rng = generator("route/ties")
    logits = torch.randint(-3, 4, (tokens, 128), generator=rng).float()
    bias = torch.randint(0, 3, (128,), generator=rng).float() / 4
    check(run, logits, bias)


def test_all_equal_goes_to_the_lowest_ids(run):
    """Every rank must choose alike: equal scores go by id."""
    weights, ids = run("route_topk", torch.zeros(3, 128), torch.zeros(128), **M3)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert weights.eq(0.5).all()


@pytest.mark.parametrize("level", [-80.0, 100.0, -math.inf, math.inf])
def test_saturated_logits(run, level):
    """Sigmoids of 0 or 1: still four experts; a sum of zero gives weights of zero, not NaN."""
    logits = torch.full((1, 16), level)
    weights, ids = run("route_topk", logits, torch.zeros(16), **M3)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert weights.sum() == (0.0 if level == -math.inf else pytest.approx(2.0))


def test_nan_rows_name_distinct_experts(run):
    """A padded row full of NaN, and rows with one: distinct experts, weight 0 for the NaN, no other row touched."""
    rng = generator("route/nan")
    logits = torch.randn(4, 16, generator=rng)
    clean_weights, clean_ids = run("route_topk", logits, torch.zeros(16), **M3)
    logits[1] = math.nan
    logits[2, 5] = math.nan
    logits[2, 6] = math.inf
    logits[3, :13] = math.nan
    weights, ids = run("route_topk", logits, torch.zeros(16), **M3)
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert not weights[1].any()
    assert ids[2, 0] == 6
    assert 5 not in ids[2].tolist()
    assert set(ids[3, :3].tolist()) == {13, 14, 15}
    assert ids[3, 3] == 0
    assert weights[3, 3] == 0
    assert weights[3].sum() == pytest.approx(2.0)
    assert torch.equal(ids[0], clean_ids[0])
    assert torch.equal(weights[0], clean_weights[0])
    check(run, logits, torch.zeros(16))


def test_nan_comes_after_minus_infinity(run):
    """A bias of -inf takes an expert out before NaN ones come in."""
    bias = torch.zeros(6)
    bias[4] = -math.inf
    logits = torch.tensor([[math.nan, 0.0, 0.0, math.nan, 0.0, 0.0]])
    _, ids = run("route_topk", logits, bias, **M3)
    assert ids.tolist() == [[1, 2, 5, 4]]


def test_scale_and_renormalisation(run):
    """Identity experts give exactly routed_scale; without renormalisation the sigmoids weigh as they are."""
    logits, bias = torch.tensor([[3.0, 1.0, -1.0, 0.5]]), torch.zeros(4)
    weights, _ = run("route_topk", logits, bias, **M3)
    assert weights.sum() == pytest.approx(2.0, rel=1e-6)
    raw, ids = run("route_topk", logits, bias, top_k_experts=2, renormalize=False, routed_scale=3.0)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(raw, 3.0 * torch.sigmoid(torch.tensor([[3.0, 1.0]])))


def test_strided_logits_and_fp64(run, exact):
    """A slice of a wider row; and the fp64 oracle agrees."""
    wide = torch.randn(5, 200, generator=generator("route/strided"))
    logits, bias = wide[:, 33:161], 0.1 * torch.randn(128, generator=generator("route/bias"))
    weights, ids = run("route_topk", logits, bias, **M3)
    exact_weights, exact_ids = exact("route_topk", logits, bias, **M3)
    assert torch.equal(ids, exact_ids)
    assert_rows(weights, exact_weights, 1e-6)


def test_a_row_does_not_depend_on_its_batch():
    """The same bits alone and among others."""
    logits = torch.randn(9, 128, generator=generator("route/rows"))
    for part in (0, 1):
        assert_row_alone(lambda rows, part=part: route_topk(logits[list(rows)], torch.zeros(128), **M3)[part], 9)


def test_forced_rows_keep_their_ids_and_their_order(run):
    """Replay: a row of ids is taken as it is, whatever bias and scores say; its weights come from the sigmoid."""
    logits, bias = torch.randn(4, 16, generator=generator("route/forced")), 0.5 * torch.arange(16.0)
    forced = torch.tensor([[-1] * 4, [9, 2, 11, 0], [-1] * 4, [3, 1, 2, 15]], dtype=torch.int32)
    weights, ids = run("route_topk", logits, bias, forced, **M3)
    usual_weights, usual = run("route_topk", logits, bias, **M3)
    assert torch.equal(ids[1::2], forced[1::2])
    assert torch.equal(ids[::2], usual[::2])
    assert torch.equal(weights[::2], usual_weights[::2])
    score = torch.sigmoid(logits.double()).gather(-1, forced.clamp(min=0).long())[1::2]
    assert_rows(weights[1::2], 2 * score / score.sum(-1, keepdim=True), 1e-6)


def test_forced_rows_may_have_holes_and_repeats(run):
    """-1 among ids stays and weighs nothing; an id that stands twice weighs twice; a NaN logit weighs nothing."""
    logits = torch.tensor([[0.0, 1.0, math.nan, 2.0]]).repeat(3, 1)
    forced = torch.tensor([[3, -1, 0, -1], [1, 1, 3, 0], [2, 0, 2, 2]], dtype=torch.int32)
    weights, ids = run("route_topk", logits, torch.zeros(4), forced, **M3)
    assert torch.equal(ids, forced)
    s = torch.sigmoid(torch.tensor([0.0, 1.0, 0.0, 2.0], dtype=torch.float64))
    wanted = torch.stack(
        [
            torch.stack([s[3], s[0] * 0, s[0], s[0] * 0]) / (s[3] + s[0]),
            torch.stack([s[1], s[1], s[3], s[0]]) / (2 * s[1] + s[3] + s[0]),
            torch.tensor([0.0, 1, 0, 0], dtype=torch.float64),
        ]
    )
    assert_rows(weights, 2 * wanted, 1e-6)


def test_a_forced_id_beyond_the_experts_is_refused():
    """It is an error, not somebody else's logit."""
    with pytest.raises(RuntimeError):
        route_topk(torch.zeros(1, 8), torch.zeros(8), torch.tensor([[0, 1, 2, 8]], dtype=torch.int32), **M3)
