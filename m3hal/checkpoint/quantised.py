"""The tiny MiniMax-M3 in the layouts of quantised checkpoints, for tests and demonstrations.

    python -m m3hal.checkpoint.quantised DIRECTORY --layout mxfp8|nvfp4|mixed [--seed N]

mxfp8: as MiniMax publishes it; every projection, MLP and expert.
nvfp4: as NVIDIA ModelOpt writes it; MLPs and experts.
mixed: ModelOpt's mixed precision; NVFP4 experts, MXFP8 for the rest, and scales of an FP8 KV cache.
MXFP4 as AMD Quark writes it is made by :mod:`m3hal.checkpoint.mxfp4`.

Source: vLLM 0.32's readers of these layouts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from m3hal import formats
from m3hal._lazy import torch
from m3hal.checkpoint import tiny
from m3hal.formats import spec_of
from m3hal.formats.nvfp4 import global_scale_of

LAYOUTS = ("mxfp8", "nvfp4", "mixed")

_ATTENTION = re.compile(r".*\.self_attn\.(index_)?[qkvo]_proj")
_MLP = re.compile(r".*\.(mlp|shared_experts)\.(gate|up|down)_proj")
_EXPERT = re.compile(r".*\.experts\.\d+\.w[123]")

Tensors = dict[str, "torch.Tensor"]


def write(directory: str | Path, layout: str, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Writes the checkpoint into ``directory`` (created if absent) and returns it; dtype: of what is not quantised."""
    from safetensors.torch import save_file

    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; there are {', '.join(LAYOUTS)}")
    target = tiny.write(directory, dtype=dtype, seed=seed)
    plain = tiny.tensors(dtype=dtype, seed=seed)
    chosen = {name: _format(layout, name.removesuffix(".weight")) for name in plain}
    found: Tensors = {}
    for name, weight in plain.items():
        format = chosen[name]
        found |= _WRITERS[format](name.removesuffix(".weight"), weight.float()) if format else {name: weight}
    if layout == "mixed":
        found = {name.removesuffix("_inv"): tensor for name, tensor in found.items()} | _kv_scales()
    save_file(found, str(target / "model.safetensors"), metadata={"format": "pt"})
    modules = {name.removesuffix(".weight"): format for name, format in chosen.items() if name.endswith(".weight")}
    config = {**tiny.config(dtype), "quantization_config": _config(layout, modules)}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return target


def _format(layout: str, module: str) -> str:
    """Of a module; "": not quantised."""
    if _EXPERT.fullmatch(module):
        return "mxfp8" if layout == "mxfp8" else "nvfp4"
    if _MLP.fullmatch(module):
        return "nvfp4" if layout == "nvfp4" else "mxfp8"
    return "mxfp8" if _ATTENTION.fullmatch(module) and layout != "nvfp4" else ""


def _mxfp8(module: str, weight: torch.Tensor) -> Tensors:
    """With the scale by MiniMax's name, which is ``weight_scale`` in ModelOpt's layout."""
    stored = formats.quantize(weight, spec_of("mxfp8"))
    assert stored.scale is not None
    return {
        f"{module}.weight": stored.data.view(torch.float8_e4m3fn),
        f"{module}.weight_scale_inv": stored.scale.view(torch.uint8),
    }


def _nvfp4(module: str, weight: torch.Tensor) -> Tensors:
    global_scale = global_scale_of(weight)
    stored = formats.quantize(weight, spec_of("nvfp4"), global_scale)
    assert stored.scale is not None
    return {
        f"{module}.weight": stored.data,
        f"{module}.weight_scale": stored.scale.view(torch.float8_e4m3fn),
        f"{module}.weight_scale_2": global_scale,
        f"{module}.input_scale": torch.tensor(0.01),
    }


_WRITERS: Mapping[str, Callable[[str, torch.Tensor], Tensors]] = {"mxfp8": _mxfp8, "nvfp4": _nvfp4}


def _kv_scales() -> Tensors:
    """A scale for each layer's keys and one for its values, all different."""
    found: Tensors = {}
    for layer in range(tiny.TEXT_CONFIG["num_hidden_layers"]):
        for number, part in enumerate("kv"):
            name = f"language_model.model.layers.{layer}.self_attn.{part}_proj.{part}_scale"
            found[name] = torch.tensor(0.011 + 0.003 * layer + 0.001 * number)
    return found


def _config(layout: str, modules: Mapping[str, str]) -> dict[str, Any]:
    """``quantization_config``; modules: name -> format, "" for those that are not quantised."""
    ignored = ["lm_head", "vision_tower*", "multi_modal_projector*", "patch_merge_mlp*"]
    ignored += [name for name, format in modules.items() if not format and name.endswith(".gate")]
    if layout == "mxfp8":
        return {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0", "ignored_layers": ignored}
    common = {"quant_method": "modelopt", "producer": {"name": "modelopt"}}
    if layout == "nvfp4":
        return {**common, "quant_algo": "NVFP4", "group_size": 16, "ignore": [*ignored, "*self_attn*"]}
    recipes = {"mxfp8": {"quant_algo": "MXFP8"}, "nvfp4": {"quant_algo": "NVFP4", "group_size": 16}}
    listed = {name: recipes[format] for name, format in modules.items() if format}
    return {
        **common,
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "quantized_layers": listed,
        "ignore": ignored,
    }


def main(argv: list[str] | None = None) -> int:
    """``python -m m3hal.checkpoint.quantised``."""
    parser = argparse.ArgumentParser(prog="python -m m3hal.checkpoint.quantised", description="A tiny quantised M3.")
    parser.add_argument("directory")
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print(write(args.directory, args.layout, dtype=args.dtype, seed=args.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
