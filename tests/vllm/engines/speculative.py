"""One engine with n-gram speculation: several tokens of a request are verified in one forward."""

from __future__ import annotations

from typing import Any

from _engine import complete, main, start


def run(job: dict[str, Any]) -> dict[str, Any]:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    llm = start(job["checkpoint"], speculative_config=ngram, max_num_batched_tokens=512, disable_log_stats=False)
    completions = complete(llm, job["prompts"])
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {"completions": completions, "drafted": metrics["vllm:spec_decode_num_draft_tokens"]}


if __name__ == "__main__":
    main(run)
