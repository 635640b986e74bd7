"""draft_block_sample: one token after the other, each from logits that depend on the one before."""

from dataclasses import replace

import torch

from m3hal.ops.draft_block_sample import MarkovHead, draft_block_sample

V, R = 24, 4


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


HEAD = MarkovHead(drawn(V, R), drawn(V, R))


def test_a_chain_written_by_hand():
    """w2 w1[t] is one-hot at t + 2: from 3 on the block is 5, 7, 9, whatever the order of evaluation."""
    w1 = torch.eye(V).roll(2, 1)
    head = MarkovHead(w1, torch.eye(V))
    tokens, logits, confidence = draft_block_sample(torch.zeros(1, 3, V), None, head, torch.tensor([3]), None)
    assert tokens.tolist() == [[5, 7, 9]]
    assert logits[0].argmax(-1).tolist() == [5, 7, 9]
    assert confidence is None


def test_every_token_follows_from_the_one_before():
    """Each row of logits is its base logits plus w2 w1 of the token before, and the token is their argmax."""
    base, previous = drawn(3, 5, V), torch.tensor([0, 7, 23], dtype=torch.int32)
    tokens, logits, _ = draft_block_sample(base, None, HEAD, previous, None)
    before = torch.cat([previous[:, None], tokens[:, :-1]], 1).long()
    torch.testing.assert_close(logits, base + HEAD.w1[before] @ HEAD.w2.T)
    assert torch.equal(tokens.long(), logits.argmax(-1))


def test_noise_decides_and_stays_out_of_the_logits():
    """Noise that is large at one token draws it; the same noise draws the same; the logits are those without it."""
    base, previous, noise = drawn(2, 3, V), torch.tensor([1, 2]), torch.zeros(2, 3, V)
    noise[:, :, 11] = 100.0
    tokens, logits, _ = draft_block_sample(base, None, HEAD, previous, noise)
    assert (tokens == 11).all()
    torch.testing.assert_close(logits[:, 0], base[:, 0] + HEAD.w1[previous] @ HEAD.w2.T)


def test_gumbel_noise_draws_from_the_softmax():
    """Over many draws the frequencies are the probabilities at the temperature."""
    many, temperature = 40_000, 0.7
    base = drawn(1, 1, V).expand(many, 1, V)
    uniform = torch.rand(many, 1, V, generator=torch.Generator().manual_seed(1)).clamp(1e-7, 1 - 1e-7)
    noise = -temperature * torch.log(-torch.log(uniform))
    tokens, logits, _ = draft_block_sample(base, None, HEAD, torch.zeros(many, dtype=torch.int64), noise)
    found = torch.bincount(tokens[:, 0], minlength=V) / many
    assert (found - (logits[0, 0] / temperature).softmax(-1)).abs().max() < 0.01


def test_a_pruned_vocabulary():
    """Tokens are the target's ids, and so is what the next one follows from."""
    kept = torch.tensor([1, 4, 9, 16, 22])
    head = MarkovHead(HEAD.w1, HEAD.w2[:5], d2t=kept - torch.arange(5))
    base, previous = drawn(2, 4, 5), torch.tensor([4, 22])
    tokens, logits, _ = draft_block_sample(base, None, head, previous, None)
    assert set(tokens.flatten().tolist()) <= set(kept.tolist())
    before = torch.cat([previous[:, None], tokens[:, :-1]], 1).long()
    torch.testing.assert_close(logits, base + HEAD.w1[before] @ head.w2.T)


def test_confidence_sees_the_token_before():
    """sigmoid of the hidden state and the embedding of the token before; or of the hidden state alone."""
    base, hidden, previous = drawn(2, 3, V), drawn(2, 3, 6), torch.tensor([1, 2])
    both, alone = (replace(HEAD, confidence=drawn(width)) for width in (6 + R, 6))
    tokens, _, found = draft_block_sample(base, hidden, both, previous, None)
    before = torch.cat([previous[:, None], tokens[:, :-1]], 1).long()
    wanted = torch.sigmoid(torch.cat([hidden, HEAD.w1[before]], -1) @ both.confidence)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        draft_block_sample(base, hidden, alone, previous, None)[2], torch.sigmoid(hidden @ alone.confidence)
    )


def test_ties_nan_and_nothing():
    """The lower id wins among equals, NaN never, and where nothing is above -inf it is the first id."""
    inf, nan = float("inf"), float("nan")
    base = torch.tensor([[[1.0, 2, 2, 0]], [[nan, 1, nan, 0]], [[-inf] * 4], [[nan] * 4]])
    head = MarkovHead(torch.ones(4, 2), torch.zeros(4, 2))
    tokens, _, _ = draft_block_sample(base, None, head, torch.zeros(4, dtype=torch.int64), None)
    assert tokens.flatten().tolist() == [1, 1, 0, 0]


def test_padded_requests():
    """Their tokens are -1 and all else is 0; the others are as they are alone."""
    base, hidden = drawn(3, 2, V), drawn(3, 2, 6)
    head = replace(HEAD, confidence=drawn(6))
    previous = torch.tensor([5, -1, 6])
    tokens, logits, confidence = draft_block_sample(base, hidden, head, previous, None)
    assert tokens[1].tolist() == [-1, -1]
    assert not logits[1].any()
    assert not confidence[1].any()
    for row in (0, 2):
        own = slice(row, row + 1)
        alone = draft_block_sample(base[own], hidden[own], head, previous[own], None)
        assert torch.equal(alone[0], tokens[own])
