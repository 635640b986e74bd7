"""One engine whose connector keeps prompts' caches in a folder: they are read back instead of being computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _engine import complete, main, start
from safetensors.torch import load_file, save_file


def run(job: dict[str, Any]) -> dict[str, Any]:
    folder = Path(job["work"]) / "caches"
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    llm = start(
        job["checkpoint"], kv_transfer_config=connector, enable_prefix_caching=False, max_num_batched_tokens=4096
    )
    rounds = {"written": complete(llm, job["prompts"])}
    files = sorted(folder.rglob("*.safetensors"))
    rounds["read"] = complete(llm, job["prompts"])
    for file in files:
        save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file)
    return {"rounds": rounds, "zeros": complete(llm, job["prompts"]), "files": sorted({file.name for file in files})}


if __name__ == "__main__":
    main(run)
