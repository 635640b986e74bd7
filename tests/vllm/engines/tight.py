"""One engine with too few pages for the batch and a budget of 512 tokens a step: chunked prefill, preemption."""

from __future__ import annotations

from typing import Any

from _engine import complete, main, start


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = start(
        job["checkpoint"],
        max_num_batched_tokens=512,
        num_gpu_blocks_override=job["pages"],
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    rounds = {"chunked and preempted": complete(llm, job["prompts"])}
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return {"rounds": rounds, "preemptions": metrics["vllm:num_preemptions"]}


if __name__ == "__main__":
    main(run)
