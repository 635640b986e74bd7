"""A tiny checkpoint, what transformers says about it, and a way to run an engine script; each made once a session."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for vllm_sources

ENGINES = Path(__file__).parent / "engines"
#: From less than a page to 12 of them. 32 more tokens make the second, third and fourth outgrow their pages.
PROMPT_LENGTHS = (7, 120, 250, 760, 1500)

Run = Callable[..., dict[str, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM is installed by the user, not by m3hal; without it there is nothing to test here."""
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed; `make setup` installs it")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(2, 512) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from m3hal.checkpoint import tiny

    return tiny.write(tmp_path_factory.mktemp("tiny32"))


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a Python program as vLLM wants it on a shared CPU; fails the test with its output when it fails."""

    def run(*arguments: object, env: dict[str, str] | None = None, check: bool = True) -> Any:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("M3HAL_", "VLLM_"))}
        kept |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
        kept |= {"VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
        command = [sys.executable, "-W", "ignore", *map(str, arguments)]
        done = subprocess.run(command, env={**kept, **(env or {})}, capture_output=True, text=True, timeout=300)
        if check and done.returncode:
            pytest.fail(f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        return done

    return run


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory, python: Run) -> Run:
    """``engine("plain", checkpoint=..., prompts=...)`` runs a script of engines/ and returns what it wrote."""

    def run(script: str, env: dict[str, str] | None = None, **job: Any) -> dict[str, Any]:
        work = tmp_path_factory.mktemp(script)
        (work / "job.json").write_text(json.dumps(job, default=str))
        in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(env or {})}
        done = python(ENGINES / f"{script}.py", work / "job.json", work / "out.json", env=in_process)
        return {**json.loads((work / "out.json").read_text()), "log": done.stdout + done.stderr}

    return run


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory, python: Run, checkpoint: Path, prompts: list[list[int]]) -> Any:
    """32 greedy tokens of each prompt by transformers in fp32, with log-probabilities and margins."""
    work = tmp_path_factory.mktemp("oracle")
    (work / "prompts.json").write_text(json.dumps(prompts))
    python("-m", "m3hal.checkpoint.oracle", checkpoint, work / "prompts.json", work / "out.json")
    return json.loads((work / "out.json").read_text())


@pytest.fixture(scope="session")
def difference() -> Callable[[Any, Any], str]:
    """How completions differ from the oracle's: the first wrong token, or the worst log-probability; "" if neither."""

    def compare(found: Any, expected: Any, tolerance: float = 1e-4) -> str:
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            tokens, length = len(ours["tokens"]), len(theirs["prompt"])
            if ours["tokens"] != theirs["tokens"][:tokens]:
                return f"prompt of {length} tokens: {ours['tokens']} instead of {theirs['tokens'][:tokens]}"
            pairs = zip(ours["logprobs"], theirs["logprobs"][:tokens], strict=True)
            worst = max(abs(a - b) for a, b in pairs)
            if not worst <= tolerance:
                return f"prompt of {length} tokens: a log-probability is off by {worst:.2e}"
        return ""

    return compare
