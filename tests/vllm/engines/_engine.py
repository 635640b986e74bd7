"""What the engine scripts share. Each script is one process with one vLLM engine: ``script.py JOB.json OUT.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

POLICY = {"m3hal": {"backend": "reference"}}


def main(run: Callable[[dict[str, Any]], Any]) -> None:
    """Reads the job, runs it, writes what it returned."""
    job, out = sys.argv[1:]
    Path(out).write_text(json.dumps(run(json.loads(Path(job).read_text()))))


def start(checkpoint: str, **settings: Any) -> Any:
    """A vLLM engine in this process."""
    from vllm import LLM

    defaults = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "kv_cache_memory_bytes": 256 << 20}
    return LLM(checkpoint, **{**defaults, "additional_config": POLICY, **settings})


def complete(llm: Any, prompts: Sequence[Sequence[int]], tokens: int = 32) -> list[dict[str, Any]]:
    """Greedy continuations of a batch, with the log-probability of each token and how much of the prompt was cached."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
    found = []
    for output in outputs:
        completion = output.outputs[0]
        chosen = zip(completion.logprobs, completion.token_ids, strict=True)
        found.append(
            {
                "tokens": list(completion.token_ids),
                "logprobs": [candidates[token].logprob for candidates, token in chosen],
                "cached": output.num_cached_tokens,
            }
        )
    return found
