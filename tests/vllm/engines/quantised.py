"""One engine on one checkpoint: what it completes, and a digest of every parameter that it holds."""

from __future__ import annotations

import hashlib
from typing import Any

from _engine import complete, main, start


def run(job: dict[str, Any]) -> dict[str, Any]:
    settings = job.get("settings", {})
    llm = start(job["checkpoint"], **{"dtype": "bfloat16", **settings})
    model = llm.llm_engine.vllm_config.model_config
    one_rank = settings.get("tensor_parallel_size", 1) == 1
    return {
        "completions": complete(llm, job["prompts"]),
        "parameters": llm.apply_model(digests)[0] if one_rank else {},
        "architecture": model.architecture,
        "quantization": model.quantization,
    }


def digests(model: Any) -> dict[str, list[str]]:
    """Name -> dtype and SHA-256 of the bytes."""
    import torch

    return {
        name: [
            str(tensor.dtype),
            hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest(),
        ]
        for name, tensor in model.named_parameters()
    }


if __name__ == "__main__":
    main(run)
