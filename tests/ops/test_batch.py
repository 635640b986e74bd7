"""SeqMeta: where each query token stands."""

import torch
from m3hal_conformance.inputs import batch, generator

from m3hal.ops import SeqMeta


def test_positions():
    """seq_len - q_len + i, for prefill, chunks, decode and empty requests; -1 in padded ones and past the last."""
    requests = [(5, 5), (3, 10), (0, 7), (2, 0), (1, 129)]
    meta = batch(requests, 128, generator("positions")).meta
    expected = [*range(5), 7, 8, 9, -1, -1, 128]
    assert meta.positions(11).tolist() == expected
    assert meta.positions(14).tolist() == [*expected, -1, -1, -1]  # a graph captured at 14 tokens
    assert meta.positions(0).tolist() == []


def test_nobody():
    """A batch without requests."""
    empty = torch.zeros(0, dtype=torch.int32)
    meta = SeqMeta(torch.zeros(1, dtype=torch.int32), empty, empty.view(0, 1), 0, 0)
    assert meta.positions(2).tolist() == [-1, -1]
