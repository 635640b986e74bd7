"""One engine whose model torch.compile has traced: prefill in chunks, decode, and again from the prefix cache."""

from __future__ import annotations

from typing import Any

from _engine import complete, main, start


def run(job: dict[str, Any]) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    llm = start(job["checkpoint"], max_num_batched_tokens=512)
    config = llm.llm_engine.vllm_config.compilation_config
    return {
        "mode": config.mode.name,
        "rounds": [complete(llm, job["prompts"]) for _ in range(2)],
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }


if __name__ == "__main__":
    main(run)
