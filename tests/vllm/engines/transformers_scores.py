"""No engine: transformers' log-probabilities of given continuations, in fp32 and in bf16, on the same checkpoint."""

from __future__ import annotations

from typing import Any

from _engine import main

from m3hal.checkpoint import oracle


def run(job: dict[str, Any]) -> dict[str, Any]:
    pairs = list(zip(job["prompts"], job["continuations"], strict=True))
    found = {}
    for dtype in ("float32", "bfloat16"):
        model = oracle.load(job["checkpoint"], dtype)
        found[dtype] = [oracle.score(model, prompt, tokens) for prompt, tokens in pairs]
    return found


if __name__ == "__main__":
    main(run)
