"""One engine over two tensor-parallel ranks, which slice every expert or, with ``expert_parallel``, deal them out."""

from __future__ import annotations

from typing import Any

from _engine import complete, main, start


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = start(
        job["checkpoint"],
        tensor_parallel_size=2,
        enable_expert_parallel=job.get("expert_parallel", False),
        max_num_batched_tokens=512,
    )
    return {"completions": complete(llm, job["prompts"]), "experts": llm.apply_model(experts)}


def experts(model: Any) -> list[int]:
    """Shape of one layer's gate and up: experts, rows, columns."""
    shape: list[int] = list(model.model.layers[-1].block_sparse_moe.experts.w13.shape)
    return shape


if __name__ == "__main__":
    main(run)
