"""A quantised checkpoint as an fp32 one of the same numbers, decoded by ml_dtypes; and the scales of its caches."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "formats"))
import format_oracle


def decode(checkpoint: Path, target: Path) -> dict[str, tuple[float, float]]:
    """Writes the fp32 checkpoint; returns layer -> (scale of keys, scale of values)."""
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    target.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.glob("token*.json"):
        shutil.copy(file, target)
    (target / "config.json").write_text(json.dumps(config))
    stored = {name: tensor for shard in checkpoint.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    stored = {name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in stored.items()}
    plain, scales = {}, {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if name.endswith((".k_scale", ".v_scale")):
            scales[name] = float(tensor)
        elif f"{module}.weight_scale" in stored:
            plain[name] = torch.from_numpy(numbers(module, stored))
        elif not name.endswith(("_scale", "_scale_2")):
            plain[name] = tensor.float()
    save_file(plain, target / "model.safetensors", {"format": "pt"})
    return by_layer(scales)


def numbers(module: str, stored: dict[str, torch.Tensor]) -> np.ndarray:
    """What a quantised matrix stands for: the format is told by the tensors that it consists of."""
    codes, scale = raw(stored[f"{module}.weight"]), raw(stored[f"{module}.weight_scale"])
    if f"{module}.weight_scale_2" in stored:
        blocks = format_oracle.decode_e2m1(codes).reshape(*scale.shape, 16)
        blocks = blocks * format_oracle.decode_e4m3(scale)[..., None] * np.float32(stored[f"{module}.weight_scale_2"])
    else:
        is_mxfp8 = codes.shape[1] == 32 * scale.shape[1]
        values = format_oracle.decode_e4m3(codes) if is_mxfp8 else format_oracle.decode_e2m1(codes)
        blocks = values.reshape(*scale.shape, 32) * np.exp2(scale.astype(np.float32) - 127)[..., None]
    return blocks.reshape(len(codes), -1).astype(np.float32)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def by_layer(scales: dict[str, float]) -> dict[str, tuple[float, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, scale in scales.items():
        found.setdefault(name.split(".layers.")[1].partition(".")[0], {})[name[-7]] = scale
    return {layer: (pair["k"], pair["v"]) for layer, pair in found.items()}
