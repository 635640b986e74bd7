"""Which format each matrix of a checkpoint has, and which tensors that asks for; no vLLM needed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from m3hal.checkpoint import mxfp4, quantised, tiny
from m3hal.checkpoint.convert import GAUDI2, HOPPER
from m3hal.checkpoint.convert.config import quantization_config
from m3hal.vllm import published
from m3hal.vllm.schemes import Schemes, schemes

LAYER = "model.layers.5"
EXPERT, SHARED = f"{LAYER}.block_sparse_moe.experts.7.w1", f"{LAYER}.block_sparse_moe.shared_experts.up_proj"
QUERY, DENSE, GATE = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.gate_proj", f"{LAYER}.block_sparse_moe.gate"

MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"language_model.{LAYER}.self_attn": {"quant_algo": "MXFP8"},
        f"{LAYER}.block_sparse_moe.experts": {"quant_algo": "NVFP4", "group_size": 16},
        f"language_model.{SHARED}": {"quant_algo": "MXFP8"},
    },
    "ignore": ["model.language_model.layers.5.block_sparse_moe.gate*", "lm_head"],
}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "mxfp8": (
        {"quant_method": "mxfp8", "ignored_layers": [f"language_model.{GATE}", "lm_head"]},
        {EXPERT: "mxfp8", QUERY: "mxfp8", DENSE: "mxfp8", GATE: "", "lm_head": ""},
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*", "*.gate", "lm_head"]},
        {EXPERT: "nvfp4", SHARED: "nvfp4", QUERY: "", GATE: "", "lm_head": ""},
    ),
    "nvfp4 by its older name": (
        {
            "quant_method": "modelopt",
            "quantization": {"quant_algo": "NVFP4", "exclude_modules": [f"{LAYER}.self_attn"]},
        },
        {EXPERT: "nvfp4", QUERY: ""},
    ),
    "mixed": (MIXED, {EXPERT: "nvfp4", SHARED: "mxfp8", QUERY: "mxfp8", GATE: "", DENSE: "", "lm_head": ""}),
    "quark": (
        {**mxfp4.quark_config()},
        {EXPERT: "mxfp4", SHARED: "mxfp4", QUERY: "", DENSE: "", GATE: "", "lm_head": ""},
    ),
    "converted": (quantization_config(HOPPER), {EXPERT: "fp8_e4m3", SHARED: "", QUERY: "", DENSE: "", GATE: ""}),
    "converted for gaudi": (quantization_config(GAUDI2), {EXPERT: "fp8_e4m3_240"}),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_each_module_has_its_format(name: str, prefix: str) -> None:
    """By the checkpoint's names and by the engine's, and whatever prefix the config used."""
    config, expected = CONFIGS[name]
    found = schemes(config)
    assert {module: found.of(prefix + module) for module in expected} == expected


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "awq"}, "does not serve quantisation 'awq'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "does not serve quantisation 'modelopt FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "NVFP4 has groups of 16"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "has no 'quantized_layers'"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8"}}}, "weights {'dtype': 'fp8'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            "does not serve quantisation 'compressed-tensors'",
        ),
    ],
)
def test_what_is_not_served_is_named(config: dict[str, Any], sentence: str) -> None:
    """A refusal, never a guess."""
    with pytest.raises(ValueError, match=sentence):
        schemes(config)


def test_matrices_that_are_computed_together_are_stored_alike() -> None:
    """An indexer that is left out of a quantised layer's fused projection: both are named."""
    found = Schemes("mxfp4", excluded=("*index_q_proj",))
    names = [f"{LAYER}.self_attn.{name}" for name in ("q_proj", "index_q_proj")]
    with pytest.raises(ValueError, match=r"q_proj is mxfp4 and .*index_q_proj is not quantised"):
        found.of_all(names)
    assert Schemes("mxfp4", excluded=("*self_attn*",)).of_all(names) == ""


@pytest.mark.parametrize("layout", ["plain", *quantised.LAYOUTS])
def test_the_published_tensors_are_all_known(layout: str, tmp_path: Any) -> None:
    """Names and shapes that the config asks for are those of a checkpoint, and no others."""
    from safetensors.torch import load_file

    folder = tiny.write(tmp_path) if layout == "plain" else quantised.write(tmp_path, layout)
    config = tiny.config() if layout == "plain" else quantised_config(folder)
    stored = {
        name.removeprefix("language_model.").replace("scale_inv", "scale"): tuple(tensor.shape)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("language_model.") and not name.endswith((".k_scale", ".v_scale"))
    }
    text = SimpleNamespace(**config["text_config"])
    expected = published.tensors(text, schemes(config.get("quantization_config")))
    assert {name: what.shape for name, what in expected.items()} == stored


def quantised_config(folder: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
