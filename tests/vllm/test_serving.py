"""Stock vLLM through the reference backend against transformers on the same files, in fp32."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

import m3hal
from m3hal.dispatch.names import LEVELS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def plain(engine: Any, checkpoint: Any, prompts: Any) -> Any:
    return engine("plain", checkpoint=checkpoint, prompts=prompts)


@pytest.fixture(scope="module")
def tight(engine: Any, checkpoint: Any, prompts: Any) -> Any:
    return engine("tight", checkpoint=checkpoint, prompts=prompts, pages=24)


def test_oracle_is_decided(oracle: Any) -> None:
    """No greedy choice of the oracle is so close that the tolerated error could turn it."""
    assert min(min(completion["margins"]) for completion in oracle) > 4e-4


@pytest.mark.parametrize("mode", ["batched", "cached", "one by one"])
def test_tokens_equal_transformers(plain: Any, oracle: Any, difference: Any, mode: str) -> None:
    """All tokens and log-probabilities are transformers', however vLLM schedules the requests."""
    assert difference(plain["rounds"][mode], oracle) == ""


def test_prefix_cache_was_hit(plain: Any, prompts: Any) -> None:
    """The second round read every full page of every prompt from the cache, the other rounds none."""
    # vLLM recomputes the page of the last token, so that there is something to sample from.
    pages = [(len(prompt) - 1) // 128 * 128 for prompt in prompts]
    assert [found["cached"] for found in plain["rounds"]["cached"]] == pages
    for mode in ("batched", "one by one"):
        assert [found["cached"] for found in plain["rounds"][mode]] == [0] * len(prompts)


def test_preempted_requests_equal_transformers(tight: Any, oracle: Any, difference: Any) -> None:
    """Prefill in chunks of 512 tokens, and requests that lose their pages and start over, change nothing."""
    assert tight["preemptions"] > 0
    assert difference(tight["rounds"]["chunked and preempted"], oracle) == ""


def test_attention_breaks_a_capture(plain: Any, oracle: Any) -> None:
    """Each layer's attention runs outside of the graphs that vLLM captures, once per forward."""
    assert plain["captured"]["completion"][0]["tokens"] == oracle[1]["tokens"][:4]
    assert plain["captured"]["breaks"] == 4 * 4  # layers, forwards


def test_plan_is_logged_once_and_written_back(plain: Any) -> None:
    """The log shows one table; its fingerprint is in additional_config, beside what the user wrote."""
    fingerprint = plain["additional_config"]["m3hal"]["fingerprint"]
    assert plain["additional_config"]["m3hal"]["backend"] == "reference"
    assert plain["log"].count("m3hal plan") == plain["log"].count(f"m3hal plan {fingerprint}") == 1
    assert plain["architecture"] == "M3HalForCausalLM"
    for operator in ("qk_norm_rope_insert", "moe_experts", "embedding"):
        assert f" {operator} " in plain["log"]


def test_metrics_say_what_serves(plain: Any) -> None:
    """/metrics carries version and fingerprint, and for each operator its implementation and verification level."""
    lines = [line for line in plain["metrics"].splitlines() if line.startswith("m3hal_")]
    (plan,) = [line for line in lines if line.startswith("m3hal_plan_info")]
    assert f'version="{m3hal.__version__}"' in plan
    assert f'fingerprint="{plain["additional_config"]["m3hal"]["fingerprint"]}"' in plan
    rows = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines if line.startswith("m3hal_operator_info")]
    served = {(row["operator"], row["site"]): row for row in rows}
    experts = served["moe_experts", "moe"]
    assert (experts["served_by"], len(experts["impl_id"])) == ("reference", 16)
    assert {row["level"] for row in rows if not row["served_by"].startswith("engine")} <= set(LEVELS)
    assert served["linear", ""]["served_by"] == "engine: vllm"
    assert "select_blocks" in {operator for operator, _ in served}


def test_image_is_refused_in_one_sentence(plain: Any, checkpoint: Any) -> None:
    """A vision-language checkpoint is served text-only: a request with a picture is answered with why not."""
    assert plain["image"] == f"{checkpoint} is not a multimodal model"
    assert "text only: images are refused" in plain["log"]


def test_speed_floor(plain: Any) -> None:
    """One request of 256 tokens: the median time from a token to the next is at most 66 ms."""
    assert len(plain["seconds_between_tokens"]) == 127
    assert statistics.median(plain["seconds_between_tokens"]) <= 0.066
