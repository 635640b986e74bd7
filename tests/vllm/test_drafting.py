"""draft_block_sample beside vLLM's own DSpark speculator, whose loop runs here on a model of four matrices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m3hal.ops.draft_block_sample import MarkovHead, draft_block_sample

REQUESTS, BLOCK, TARGET, DRAFT, RANK, HIDDEN = 3, 5, 64, 20, 8, 6


def test_it_drafts_as_vllm_does() -> None:
    """Greedy, with a pruned vocabulary and a confidence head: the same tokens, and confidence to the last digits."""
    pytest.importorskip("vllm.v1.worker.gpu.spec_decode.dspark.speculator", reason="this vLLM has no DSpark")
    torch.manual_seed(0)
    kept = torch.randperm(TARGET)[:DRAFT].sort().values
    draws = (TARGET, RANK), (DRAFT, RANK), (DRAFT, HIDDEN), (HIDDEN + RANK,), (REQUESTS * BLOCK, HIDDEN)
    w1, w2, lm_head, confidence, hidden = (torch.randn(*shape) for shape in draws)
    head = MarkovHead(w1, w2, kept - torch.arange(DRAFT), confidence)
    previous = torch.randint(0, TARGET, (REQUESTS,))
    base = (hidden @ lm_head.T).view(REQUESTS, BLOCK, DRAFT)

    tokens, _, sure = draft_block_sample(base, hidden.view(REQUESTS, BLOCK, HIDDEN), head, previous, None)
    theirs = _vllm(head, lm_head, hidden, previous)
    assert torch.equal(tokens.long(), theirs.draft_tokens)
    torch.testing.assert_close(sure, theirs.draft_token_confidence_probs, rtol=1e-6, atol=1e-6)


def _vllm(head: MarkovHead, lm_head: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor) -> Any:
    """vLLM's speculator after its sequential sampling; everything around that loop stands here."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    model = SimpleNamespace(
        model=SimpleNamespace(),
        compute_draft_logits=lambda rows: rows @ lm_head.T,
        markov_embed=lambda tokens: head.w1[tokens.long()],
        markov_bias=lambda embedding: embedding @ head.w2.T,
        map_draft_to_target=lambda draft: draft + head.d2t[draft],
        compute_confidence=lambda rows, embedding: torch.sigmoid(torch.cat([rows, embedding], -1) @ head.confidence),
    )
    positions = torch.arange(REQUESTS * BLOCK)
    own = SimpleNamespace(
        model=model,
        num_speculative_steps=BLOCK,
        sample_indices=positions,
        sample_idx_mapping=positions // BLOCK,
        sample_pos=positions % BLOCK,
        input_buffers=SimpleNamespace(input_ids=previous),
        draft_tokens=torch.zeros(REQUESTS, BLOCK, dtype=torch.int64),
        draft_token_confidence_probs=torch.zeros(REQUESTS, BLOCK),
        draft_logits=None,
        use_confidence_head=True,
        _anchor_idx=torch.arange(REQUESTS),
        _step_cols=torch.arange(BLOCK),
        _draft_topk=None,
        _maybe_predict_acceptance=lambda *_: None,
    )
    own._sample_logits = lambda *given: DSparkSpeculator._sample_logits(own, *given)
    DSparkSpeculator._sample_sequential(own, REQUESTS, hidden)
    return own
