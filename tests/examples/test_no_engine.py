"""The example that runs a whole model without an engine, against transformers on the same files."""

import sys
from pathlib import Path

import pytest

from m3hal.checkpoint import oracle, tiny

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "no_engine"))
import m3

pytest.importorskip("transformers.models.minimax_m3_vl", reason="transformers is not installed; `make setup` does it")


def test_tokens_equal_transformers(tmp_path):
    """24 tokens after a prompt of 700, read in two chunks; MSA keeps 256 of its keys."""
    prompt = m3.a_prompt(700)
    expected = oracle.greedy(oracle.load(tiny.write(tmp_path)), prompt, 24)
    tokens, found = m3.generate(m3.build("reference", "cpu"), prompt, 24)
    assert tokens == expected.tokens
    assert max(abs(float(row.max()) - theirs) for row, theirs in zip(found, expected.logprobs, strict=True)) < 1e-4
