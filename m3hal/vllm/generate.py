"""One prompt through one vLLM engine of this process: ``python -m m3hal.vllm.generate JOB.json OUT.json``.

The job: ``model``, ``prompt`` (text), ``steps``, ``config`` (m3hal's, as in ``additional_config``) and ``engine`` (more
arguments of ``vllm.LLM``). What comes out: the tokens, each with its log-probability, and their text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def generate(job: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy; in eager mode, as only there every call is seen."""
    from vllm import LLM, SamplingParams

    llm = LLM(job["model"], **{"enforce_eager": True, "max_num_seqs": 1, **job["engine"]},
              additional_config={"m3hal": job["config"]})  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=job["steps"], ignore_eos=True, logprobs=1)
    (output,) = llm.generate([job["prompt"]], sampling, use_tqdm=False)
    completion = output.outputs[0]
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "tokens": list(completion.token_ids),
        "logprobs": [candidates[token].logprob for candidates, token in pairs],
        "text": completion.text,
    }


if __name__ == "__main__":
    job, out = sys.argv[1:]
    Path(out).write_text(json.dumps(generate(json.loads(Path(job).read_text()))))
