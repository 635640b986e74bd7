"""One engine that gets other weights while it lives, of the whole model and then of one layer's experts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _engine import complete, main, start
from safetensors.torch import load_file, save_file

from m3hal.checkpoint import oracle

PART = "model.layers.2.block_sparse_moe.experts."


def run(job: dict[str, Any]) -> dict[str, Any]:
    first, second = Path(job["checkpoint"]), Path(job["other"])
    mixed = second.parent / "mixed"
    update = {name: tensor for name, tensor in load_file(first / "model.safetensors").items() if PART in name}
    mixed.mkdir()
    (mixed / "config.json").write_text((second / "config.json").read_text())
    save_file({**load_file(second / "model.safetensors"), **update}, mixed / "model.safetensors", {"format": "pt"})

    llm = start(str(first), max_num_batched_tokens=2048)
    rounds = {"before": complete(llm, job["prompts"], 8)}
    reload(llm, load_file(second / "model.safetensors"))
    rounds["after"] = complete(llm, job["prompts"], 8)
    reload(llm, update)
    rounds["of a part"] = complete(llm, job["prompts"], 8)
    expected = zip(rounds, (first, second, mixed), strict=True)
    return {"rounds": rounds, "expected": {name: completions(where, job["prompts"]) for name, where in expected}}


def reload(llm: Any, weights: dict[str, torch.Tensor]) -> None:
    """As a trainer sends them."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
    assert llm.reset_prefix_cache()


def completions(checkpoint: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    model = oracle.load(checkpoint)
    return [asdict(oracle.greedy(model, prompt, 8)) for prompt in prompts]


if __name__ == "__main__":
    main(run)
