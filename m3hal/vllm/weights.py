"""From the published tensor names to the model's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from m3hal.vllm.moe import M3MoE
from m3hal.vllm.plugin import logger

#: Not part of the text model: the vision tower, its projectors, the multi-token-prediction module.
SKIPPED = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
_SKIPPED_MODULE = ".mtp."

#: published matrix -> (fused matrix, which part of it)
_FUSED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "index_q_proj": ("qkv_proj", "index_q"),
    "index_k_proj": ("qkv_proj", "index_k"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}

#: the global scale of a layer's keys or values, as calibration tools name it
_CACHE_SCALE = re.compile(r"\.self_attn\.kv\.[kv]_scale$")
_KV_SCALE = re.compile(r"\.self_attn\.(?:attn\.|[kv]_proj\.)?(?P<part>[kv])_scale$")


def load_checkpoint(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copies a checkpoint's tensors into the model; returns the parameters that got one, for vLLM to check.

    Raises ValueError for a tensor that the model has no place for.
    """
    parameters = dict(model.named_parameters())
    loaded: set[str] = set()
    experts: set[str] = set()
    for published, weight in weights:
        name = published.removeprefix("language_model.")
        if name.startswith(SKIPPED) or _SKIPPED_MODULE in f".{name}":
            continue
        if scale := _KV_SCALE.search(name):
            target = f"{name[: scale.start()]}.self_attn.kv.{scale['part']}_scale"
            if target in parameters:  # a cache in the model's dtype has no use for it
                parameters[target].data.copy_(_checked_scale(published, weight))
                loaded.add(target)
            continue
        if ".experts." in name:
            loaded |= _load_expert(model, name, weight)
            experts.add(name)
            continue
        module, _, leaf = name.rpartition(".")
        parent, _, matrix = module.rpartition(".")
        fused, part = _FUSED.get(matrix, (matrix, None))
        target = f"{parent}.{fused}.{leaf}" if parent else name
        if target not in parameters:
            raise ValueError(f"the checkpoint's tensor {published} has no place in the model")
        parameter = parameters[target]
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        loader(parameter, weight) if part is None else loader(parameter, weight, part)
        loaded.add(target)
    _check_experts(model, experts)
    return loaded | _default_scales(parameters, loaded)


def _default_scales(parameters: Mapping[str, nn.Parameter], loaded: set[str]) -> set[str]:
    """The scales of quantised caches that the checkpoint leaves out; they stay 1, which is said once."""
    absent = {name for name in parameters if _CACHE_SCALE.search(name)} - loaded
    if absent:
        logger.warning(
            "The checkpoint has no k_scale or v_scale for %d of the quantised caches' scales; they are 1.", len(absent)
        )
    return absent


def _checked_scale(name: str, scale: torch.Tensor) -> torch.Tensor:
    """A dequantisation multiplier. Raises ValueError for what can't be one."""
    value = scale.float().reshape(-1)
    if len(value) != 1 or not torch.isfinite(value).all() or not (value > 0).all():
        raise ValueError(f"the checkpoint's tensor {name} must be one positive number; it is {scale.tolist()}")
    return value[0]


def _check_experts(model: nn.Module, loaded: set[str]) -> None:
    """One parameter holds all experts of a layer, so vLLM's own check would miss an absent one."""
    for path, layer in model.named_modules():
        if isinstance(layer, M3MoE):
            matrices = [f"{path}.experts.{e}.{w}" for e in range(len(layer.w13)) for w in ("w1", "w2", "w3")]
            wanted = {f"{matrix}.{leaf}" for matrix in matrices for leaf in layer.leaves()}
            if missing := sorted(wanted - loaded):
                raise ValueError(f"the checkpoint lacks {len(missing)} expert tensors, among them {missing[0]}")


def _load_expert(model: nn.Module, name: str, weight: torch.Tensor) -> set[str]:
    """``<layer>.block_sparse_moe.experts.<expert>.<w1|w2|w3>.<weight|weight_scale>``."""
    path, _, rest = name.partition(".experts.")
    expert, matrix, leaf = rest.split(".")
    layer = model.get_submodule(path)
    assert isinstance(layer, M3MoE)
    if leaf not in layer.leaves():
        raise ValueError(f"the checkpoint's tensor {name} has no place in a model without quantised experts")
    layer.load_expert(int(expert), matrix, leaf, weight)
    return {f"{path}.{'w2' if matrix == 'w2' else 'w13'}{leaf.removeprefix('weight')}"}
