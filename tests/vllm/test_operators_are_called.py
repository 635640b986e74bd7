"""Each operator that the layers should call is called: a lying implementation of it changes what vLLM says."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

CALLED = (
    "rms_norm",
    "add_rms_norm",
    "qk_norm_rope_insert",
    "select_blocks",
    "sparse_attention",
    "paged_attention",
    "route_topk",
    "swiglu_oai",
    "moe_experts",
)


@pytest.fixture(scope="module")
def found(engine: Any, checkpoint: Any, prompts: Any) -> Any:
    return engine("lying", checkpoint=checkpoint, prompts=[prompts[0], prompts[3]], tokens=16)


@pytest.fixture(scope="module")
def expected(oracle: Any) -> Any:
    return [oracle[0], oracle[3]]


def test_honest_sentinels_change_nothing(found: Any, expected: Any, difference: Any) -> None:
    """With every implementation honest, the sentinel backend passes the comparison."""
    assert difference(found["honest"], expected) == ""


@pytest.mark.parametrize("operator", CALLED)
def test_lying_operator_changes_the_tokens(found: Any, expected: Any, difference: Any, operator: str) -> None:
    """The prompt of 760 tokens continues differently."""
    assert "instead of" in difference(found[operator][1:], expected[1:])


def test_dense_attention_fails_the_comparison(found: Any, expected: Any, difference: Any) -> None:
    """Negative control: attention to every block is noticed, but only where there are more blocks than MSA keeps."""
    assert difference(found["dense"][:1], expected[:1]) == ""
    assert difference(found["dense"][1:], expected[1:]) != ""
