"""One engine over two ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import Any

from _engine import complete, main, start


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = start(job["checkpoint"], tensor_parallel_size=2, max_num_batched_tokens=512)
    return {"completions": complete(llm, job["prompts"])}


if __name__ == "__main__":
    main(run)
