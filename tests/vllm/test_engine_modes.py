"""Engine features that reach the layers: two ranks, and several tokens of a request verified at once."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine


def test_two_ranks_equal_transformers(engine: Any, checkpoint: Any, prompts: Any, oracle: Any, difference: Any) -> None:
    """Each rank holds half of the heads, of every expert and of the caches; both made the front end's plan."""
    found = engine("two_ranks", checkpoint=checkpoint, prompts=prompts)
    assert difference(found["completions"], oracle) == ""


def test_speculation_equals_transformers(
    engine: Any, checkpoint: Any, prompts: Any, oracle: Any, difference: Any
) -> None:
    """Drafts of three tokens are verified in one forward; what is accepted is what greedy decoding says."""
    found = engine("speculative", checkpoint=checkpoint, prompts=prompts)
    assert found["drafted"] > 20
    assert difference(found["completions"], oracle) == ""
