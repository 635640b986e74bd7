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
    assert difference(found["completions"]["honest"], expected) == ""


@pytest.mark.parametrize("operator", CALLED)
def test_lying_operator_changes_the_tokens(found: Any, expected: Any, difference: Any, operator: str) -> None:
    """The prompt of 760 tokens continues differently."""
    assert "instead of" in difference(found["completions"][operator][1:], expected[1:])


def test_dense_attention_fails_the_comparison(found: Any, expected: Any, difference: Any) -> None:
    """Negative control: attention to every block is noticed, but only where there are more blocks than MSA keeps."""
    assert difference(found["completions"]["dense"][:1], expected[:1]) == ""
    assert difference(found["completions"]["dense"][1:], expected[1:]) != ""


def test_batches_are_planned_once_for_all_layers(found: Any) -> None:
    """``plan_batch`` runs once a forward, ``run`` once a layer, with what it returned: asserted by the backend."""
    calls = found["calls"]
    assert calls["sparse_attention"]["planned"] > 16
    for operator, layers in (("select_blocks", 3), ("sparse_attention", 3), ("paged_attention", 1)):
        assert calls[operator]["ran"] == layers * calls[operator]["planned"], operator


def test_layers_of_a_site_share_one_workspace(found: Any) -> None:
    """All layers and operators of the sparse site ran in the same memory, the dense site's in another."""
    calls = found["calls"]
    (sparse,) = calls["sparse_attention"]["workspaces"]
    assert calls["select_blocks"]["workspaces"] == [sparse]
    assert len(calls["paged_attention"]["workspaces"]) == 1
    assert calls["paged_attention"]["workspaces"] != [sparse]
