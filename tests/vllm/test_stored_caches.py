"""Caches in FP8 and FP4 under stock vLLM, against transformers in fp32 that rounds what it stores by ml_dtypes.

A code flips wherever the two engines' last bits straddle a midpoint, and a flip may move a token. The prompts are such
that transformers' own tokens stay when every stored number is disturbed by 2e-6: see :func:`prompt`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from m3hal.checkpoint import tiny

pytestmark = pytest.mark.engine

#: length -> seed; found by trying seeds in order, with four disturbances of fp8 and of nvfp4 caches each
SEEDS = {250: 2, 760: 4, 1500: 2}


@dataclass(frozen=True)
class Case:
    """vLLM's options, what they mean, and bytes of one token: of keys and values of a head, and of an index key."""

    kv: str
    index: str
    stored: tuple[str, str]
    head_bytes: int
    index_bytes: int

    @property
    def bytes_per_token(self) -> int:
        text = tiny.TEXT_CONFIG
        layers, sparse = text["num_hidden_layers"], sum(text["sparse_attention_config"]["sparse_attention_freq"])
        return layers * int(text["num_key_value_heads"]) * self.head_bytes + sparse * self.index_bytes


NVFP4 = 128 // 2 + 128 // 16  # codes, and a scale for each group of 16
CASES = {
    "fp8": Case("fp8", "fp8", ("fp8", "fp8"), 2 * 128, 128),
    "nvfp4": Case("nvfp4", "nvfp4", ("nvfp4", "nvfp4"), 2 * NVFP4, NVFP4),
    "nvfp4 with index keys in the model's dtype": Case("nvfp4", "auto", ("nvfp4", "float32"), 2 * NVFP4, 512),
    "the model's dtype with mxfp4 index keys": Case("auto", "mxfp4", ("float32", "mxfp4"), 2 * 512, 64 + 128 // 32),
}
FAST = ("nvfp4",)  # FP8 is among the tests of quantised checkpoints


def prompt(length: int) -> list[int]:
    draw = random.Random(SEEDS[length] * 10000 + length)
    return [draw.randrange(2, 512) for _ in range(length)]


@pytest.fixture(scope="module", params=[n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt(length) for length in SEEDS]


@pytest.fixture(scope="module")
def found(engine: Any, checkpoint: Any, prompts: Any, case: Case) -> Any:
    return engine("stored_cache", checkpoint=checkpoint, prompts=prompts, kv=case.kv, index=case.index)


@pytest.fixture(scope="module")
def rounded(engine: Any, checkpoint: Any, prompts: Any, case: Case) -> Any:
    kv, index = case.stored
    return engine("rounded_oracle", checkpoint=checkpoint, prompts=prompts, kv=kv, index=index)


def test_tokens_equal_transformers(found: Any, rounded: Any) -> None:
    """All 32 tokens of every prompt, where what is stored is rounded to the format once."""
    for ours, theirs in zip(found["completions"], rounded["completions"], strict=True):
        assert ours["tokens"] == theirs["tokens"], f"prompt of {len(theirs['prompt'])} tokens"


def test_rounding_is_seen(found: Any, rounded: Any) -> None:
    """The log-probabilities are the rounded model's, not those of transformers in fp32, by a factor of ten."""
    ours, theirs, exact = found["completions"], rounded["completions"], rounded["exact"]
    wrong = max(_distance(a, b) for a, b in zip(ours, theirs, strict=True))
    rounding = max(_distance(a, b) for a, b in zip(exact, theirs, strict=True))
    assert wrong < rounding / 10, (wrong, rounding)


def test_a_token_takes_the_bytes_that_its_format_says(found: Any, case: Case) -> None:
    """What vLLM's allocator gave all caches is blocks of 128 tokens, and it made as many as its memory holds."""
    page = 128 * case.bytes_per_token
    assert found["allocated"] == found["blocks"] * page
    assert found["blocks"] == found["bytes"] // page


def _distance(ours: Any, theirs: Any) -> float:
    """Between the first tokens' log-probabilities: later ones follow different tokens where those differ."""
    return abs(float(ours["logprobs"][0]) - float(theirs["logprobs"][0]))
