"""One engine whose calls are watched as the job's configuration says; what it says must not change."""

from __future__ import annotations

from typing import Any

from _engine import complete, main, start


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = start(job["checkpoint"], max_num_batched_tokens=4096, additional_config={"m3hal": job["config"]})
    return {
        "completions": complete(llm, job["prompts"], job["tokens"]),
        "additional_config": llm.llm_engine.vllm_config.additional_config["m3hal"],
    }


if __name__ == "__main__":
    main(run)
