"""In bf16 greedy tokens prove nothing: near-ties flip. What can be compared is how far each engine is from fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def job(prompts: Any, oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A bf16 checkpoint, and what to score with it."""
    from m3hal.checkpoint import tiny

    checkpoint: Path = tiny.write(tmp_path_factory.mktemp("tiny16"), dtype="bfloat16")
    return {
        "checkpoint": checkpoint,
        "prompts": prompts,
        "continuations": [completion["tokens"] for completion in oracle],
    }


@pytest.fixture(scope="module")
def ours(engine: Any, job: dict[str, Any]) -> Any:
    """What vLLM with m3hal makes of it."""
    return engine("teacher", **job)


@pytest.fixture(scope="module")
def errors(engine: Any, job: dict[str, Any], ours: Any, prompts: Any) -> dict[str, float]:
    """Pooled mean |delta log-probability| from transformers-fp32, of vLLM-bf16 and of transformers-bf16."""
    theirs = engine("transformers_scores", **job)
    exact = _pooled(theirs["float32"])
    assert len(exact) == 32 * len(prompts)
    return {
        "vllm": _mean_distance(_pooled(ours["scores"]), exact),
        "transformers": _mean_distance(_pooled(theirs["bfloat16"]), exact),
    }


def test_no_further_from_fp32_than_transformers(errors: dict[str, float]) -> None:
    """m3hal's bf16 may be at most 1.25 times as far from fp32 as transformers' own bf16, on the same tokens."""
    assert errors["vllm"] <= 1.25 * errors["transformers"], errors


def test_bf16_was_really_used(errors: dict[str, float]) -> None:
    """Both differ from fp32 by more than fp32 differs from itself."""
    assert min(errors.values()) > 1e-3


def test_the_router_stays_fp32(ours: Any) -> None:
    """Its weights and its bias; log-probabilities of a tiny model are too coarse to show it."""
    assert set(ours["dtypes"]["router"]) == {"torch.float32"}
    assert set(ours["dtypes"]["other"]) == {"torch.bfloat16"}


def _pooled(scores: list[list[float]]) -> list[float]:
    return [value for row in scores for value in row]


def _mean_distance(found: list[float], exact: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(found, exact, strict=True)) / len(exact)
