"""No engine: vLLM's loader on quantised checkpoints, whole and damaged, in one process; what it says about each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _engine import POLICY, main
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from m3hal.vllm import plugin, stored
from m3hal.vllm.model import M3HalForCausalLM

Tensors = dict[str, torch.Tensor]

#: one of each kind, by layer 1's names
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w2"
ATTENTION = "language_model.model.layers.1.self_attn.index_q_proj"
QKV = "language_model.model.layers.0.self_attn.qkv_proj"
SHARED = "language_model.model.layers.1.block_sparse_moe.shared_experts.up_proj"


def run(job: dict[str, Any]) -> dict[str, Any]:
    plugin.register()
    work = Path(job["work"])
    init_distributed_environment(1, 0, f"file://{work}/rendezvous", 0, "gloo")
    found = {}
    for layout, checkpoint in job["checkpoints"].items():
        found[f"{layout}: on a GPU"] = methods_on_a_gpu(Path(checkpoint))
        model, config = unloaded(checkpoint)
        for case, change in cases(layout).items():
            folder = work / f"{layout} {case}"
            damaged(Path(checkpoint), folder, change)
            found[f"{layout}: {case}"] = outcome(model, config, folder)
            shutil.rmtree(folder)
    return found


def methods_on_a_gpu(checkpoint: Path) -> dict[str, str]:
    """Which class computes the shared experts and a query projection where vLLM has kernels for the formats."""
    config = stored.StoredConfig.from_config(
        json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    )
    config.packed_modules_mapping = M3HalForCausalLM.packed_modules_mapping
    found = {}
    layers = ((MergedColumnParallelLinear, SHARED.replace("up_proj", "gate_up_proj")), (QKVParallelLinear, QKV))
    with mock.patch.object(stored, "vllm_computes", return_value=True):
        for kind, name in layers:
            layer = kind.__new__(kind)
            torch.nn.Module.__init__(layer)
            method = config.get_quant_method(layer, name.removeprefix("language_model."))
            found[name.rpartition(".")[2]] = type(method).__name__
    return found


def unloaded(checkpoint: str) -> tuple[Any, Any]:
    """The model before it has weights, as a worker makes it, and vLLM's configuration."""
    settings = {"dtype": "float32", "max_model_len": 2048, "additional_config": POLICY}
    config = EngineArgs(checkpoint, **settings).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        ensure_model_parallel_initialized(1, 1)
        return initialize_model(config), config


def cases(layout: str) -> dict[str, Callable[[Tensors], object]]:
    """Name -> what is done to a checkpoint's tensors."""
    scale = "weight_scale_inv" if layout == "mxfp8" else "weight_scale"
    projection = SHARED if layout in ("nvfp4", "mxfp4") else ATTENTION
    found: dict[str, Callable[[Tensors], object]] = {
        "whole": lambda t: None,
        "with a drafter's tensors": lambda t: t.update({"language_model.model.mtp.0.norm.weight": torch.ones(4)}),
        "expert without scale": lambda t: t.pop(f"{EXPERT}.{scale}"),
        "projection without scale": lambda t: t.pop(f"{projection}.{scale}"),
        "scale too many": lambda t: t.update({f"language_model.lm_head.{scale}": torch.ones(1)}),
        "expert too wide": lambda t: double(t, f"{EXPERT}.weight", 1),
        "projection too tall": lambda t: double(t, f"{projection}.weight", 0),
        "scale too wide": lambda t: double(t, f"{projection}.{scale}", 1),
        "projection not quantised": lambda t: t.update({f"{projection}.weight": t[f"{projection}.weight"].float()}),
    }
    if layout in ("nvfp4", "mixed"):
        found["expert's global scale is zero"] = lambda t: t.update({f"{EXPERT}.weight_scale_2": torch.zeros(())})
    if layout == "mixed":
        key = "language_model.model.layers.2.self_attn.k_proj.k_scale"
        found["cache's scale is negative"] = lambda t: t.update({key: torch.tensor(-1.0)})
    if layout in ("mxfp8", "mxfp4"):
        found["scales labelled E8M0"] = lambda t: t.update(
            {name: tensor.view(torch.float8_e8m0fnu) for name, tensor in t.items() if name.endswith(scale)}
        )
    return found


def double(tensors: Tensors, name: str, axis: int) -> None:
    """Twice as long: what a loader that cuts out its part would not notice."""
    tensors[name] = torch.cat([tensors[name].view(torch.uint8)] * 2, dim=axis).view(tensors[name].dtype)


def damaged(checkpoint: Path, folder: Path, change: Callable[[Tensors], object]) -> None:
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: tensor for shard in checkpoint.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def outcome(model: Any, config: Any, folder: Path) -> dict[str, Any]:
    """vLLM's loader as if the model had no weights yet: the error's text, or bytes of what was loaded."""
    model._has_weights = False
    config.model_config.model = str(folder)
    experts = model.model.layers[1].block_sparse_moe.experts
    experts.w2_scale.data.zero_()
    try:
        with set_current_vllm_config(config):
            get_model_loader(config.load_config).load_weights(model, config.model_config)
    except Exception as error:
        return {"error": str(error)}
    return {"w2_scale": experts.w2_scale.data.flatten()[:64].tolist()}


if __name__ == "__main__":
    main(run)
