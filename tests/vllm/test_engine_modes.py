"""Engine features that reach the layers: two ranks, compilation, several tokens of a request verified at once."""

from __future__ import annotations

from typing import Any

import pytest

from m3hal.checkpoint import tiny

pytestmark = pytest.mark.engine


@pytest.mark.slow  # of engines on two ranks, the gate runs the one whose ranks also share out experts
def test_two_ranks_equal_transformers(engine: Any, checkpoint: Any, prompts: Any, oracle: Any, difference: Any) -> None:
    """Each rank holds half of the heads, of every expert and of the caches; both made the front end's plan."""
    found = engine("two_ranks", checkpoint=checkpoint, prompts=prompts)
    assert found["experts"] == [[8, 2 * 64, 256]] * 2
    assert difference(found["completions"], oracle) == ""


def test_expert_parallel_equals_transformers(
    engine: Any, checkpoint: Any, prompts: Any, oracle: Any, difference: Any
) -> None:
    """Each rank holds half of the experts, whole, and half of the heads and of the shared expert."""
    found = engine("two_ranks", checkpoint=checkpoint, prompts=prompts, expert_parallel=True)
    assert found["experts"] == [[4, 2 * 128, 256]] * 2
    assert difference(found["completions"], oracle) == ""


@pytest.mark.slow
def test_compiled_equals_transformers(engine: Any, checkpoint: Any, prompts: Any, oracle: Any, difference: Any) -> None:
    """torch.compile traces the whole model into graphs without a break, and changes no token."""
    compiling = {"TORCHDYNAMO_DISABLE": "0", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
    found = engine("compiled", env=compiling, checkpoint=checkpoint, prompts=prompts)
    assert found["mode"] == "DYNAMO_TRACE_ONCE"
    assert found["graphs"] > 0
    assert found["breaks"] == {}
    for completions in found["rounds"]:
        assert difference(completions, oracle) == ""


def test_speculation_equals_transformers(
    engine: Any, checkpoint: Any, prompts: Any, oracle: Any, difference: Any
) -> None:
    """Drafts of three tokens are verified in one forward; what is accepted is what greedy decoding says."""
    found = engine("speculative", checkpoint=checkpoint, prompts=prompts)
    assert found["drafted"] > 20
    assert difference(found["completions"], oracle) == ""


@pytest.mark.slow
def test_drafter_sees_the_streams_and_changes_no_token(
    engine: Any, checkpoint: Any, prompts: Any, oracle: Any, difference: Any, tmp_path: Any
) -> None:
    """EAGLE3: what the drafter gets is transformers' input of the layers that it asked for; verification is greedy."""
    found = engine("eagle", checkpoint=checkpoint, prompts=prompts, work=tmp_path)
    assert found["drafted"] > 100
    assert max(found["furthest"]) < 1e-4
    assert difference(found["completions"], oracle) == ""


@pytest.mark.slow
def test_other_weights_while_the_engine_lives(
    engine: Any, checkpoint: Any, prompts: Any, difference: Any, tmp_path: Any
) -> None:
    """New weights for all layers, then for one layer's experts: each time the tokens are those of such a checkpoint."""
    other = tiny.write(tmp_path / "other", seed=1)
    found = engine("reloaded", checkpoint=checkpoint, other=other, prompts=prompts[1:3])
    for name, completions in found["rounds"].items():
        assert difference(completions, found["expected"][name]) == "", name
    assert found["rounds"]["before"] != found["rounds"]["after"] != found["rounds"]["of a part"]


@pytest.mark.slow
def test_pages_that_a_connector_brings_are_used(
    engine: Any, checkpoint: Any, prompts: Any, oracle: Any, difference: Any, tmp_path: Any
) -> None:
    """KV and index caches of whole pages are read back, not computed: with zeros instead the tokens are others."""
    found = engine("connected", checkpoint=checkpoint, prompts=prompts[2:], work=tmp_path)
    assert difference(found["rounds"]["written"], oracle[2:]) == ""
    assert difference(found["rounds"]["read"], oracle[2:]) == ""
    assert difference(found["zeros"], oracle[2:]) != ""
    assert [completion["cached"] for completion in found["rounds"]["written"]] == [0, 0, 0]
    assert min(completion["cached"] for completion in found["rounds"]["read"]) >= 128
    assert sum("index_cache" in name for name in found["files"]) == 3
