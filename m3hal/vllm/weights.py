"""From the published tensor names to the model's parameters; every tensor that is wrong is named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from m3hal.vllm.experts import StoredExperts, as_stored
from m3hal.vllm.plugin import logger
from m3hal.vllm.published import Expected

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

_CACHE_SCALE = re.compile(r"\.self_attn\.kv\.[kv]_scale$")
#: the global scale of a layer's keys or values, as calibration tools name it
_KV_SCALE = re.compile(r"\.self_attn\.(?:attn\.|[kv]_proj\.)?(?P<part>[kv])_scale$")


class Loading:
    """One pass over a checkpoint. Each tensor must be one that the config asks for, in its shape, and come once."""

    def __init__(self, model: nn.Module, expected: Mapping[str, Expected]) -> None:
        self._expected, self._parameters = expected, dict(model.named_parameters())
        self._experts = {path: m for path, m in model.named_modules() if isinstance(m, StoredExperts)}
        self._seen: set[str] = set()
        self.loaded: set[str] = set()  # the model's parameters that got a value

    def add(self, published: str, tensor: torch.Tensor) -> None:
        """Copies one tensor to its place. Raises ValueError naming it and what is wrong."""
        name = published.removeprefix("language_model.").replace("weight_scale_inv", "weight_scale")
        if name.startswith(SKIPPED) or _SKIPPED_MODULE in f".{name}":
            return
        if scale := _KV_SCALE.search(name):
            self._add_cache_scale(f"{name[: scale.start()]}.self_attn.kv.{scale['part']}_scale", published, tensor)
            return
        self._check(name, published, tensor)
        try:
            self._place(name, tensor)
        except Exception as error:
            raise ValueError(f"the checkpoint's tensor {published} does not fit: {error}") from error

    def finish(self, *, partial: bool) -> None:
        """Raises ValueError for what the checkpoint lacks, unless it is an update that may be partial."""
        absent = {name for name in self._parameters if _CACHE_SCALE.search(name)} - self.loaded
        if absent and not partial:
            logger.warning("The checkpoint has no scale for %d quantised halves of caches; they are 1.", len(absent))
        self.loaded |= absent
        missing = sorted(name for name, what in self._expected.items() if self._needs(name, what) - self._seen)
        if missing and not partial:
            raise ValueError(f"the checkpoint lacks {len(missing)} tensors, among them {missing[0]}")

    def _needs(self, name: str, what: Expected) -> set[str]:
        if what.optional or (what.expert is not None and self._layer(name).share.local(what.expert) is None):
            return set()
        return {name}

    def _layer(self, name: str) -> StoredExperts:
        return self._experts[name.partition(".experts.")[0] + ".experts"]

    def _check(self, name: str, published: str, tensor: torch.Tensor) -> None:
        expected = self._expected.get(name)
        if expected is None:
            raise ValueError(f"the checkpoint's tensor {published} has no place in the model that its config describes")
        shape = tuple(tensor.shape)
        if shape != expected.shape and not (expected.shape == () and shape == (1,)):
            raise ValueError(
                f"the checkpoint's tensor {published} is {list(shape)}; its config asks for {list(expected.shape)}"
            )
        if name in self._seen:
            raise ValueError(f"the checkpoint's tensor {published} is there twice")
        self._seen.add(name)

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        expected = self._expected[name]
        if expected.expert is not None:
            path = name.partition(".experts.")[0] + ".experts"
            done = self._layer(name).load(expected.expert, module.rpartition(".")[2], leaf, tensor)
            self.loaded |= {f"{path}.{parameter}" for parameter in done}
            return
        parent, _, matrix = module.rpartition(".")
        fused, part = _FUSED.get(matrix, (matrix, None))
        target = f"{parent}.{fused}.{leaf}" if parent else name
        parameter = self._parameters.get(target)
        if parameter is None:
            if expected.optional:
                return  # of quantised activations, where none are
            raise ValueError(f"the model has no parameter {target}")
        if parameter.element_size() == 1:
            tensor = as_stored(tensor, parameter)
        _load(parameter, tensor, *(() if part is None else (part,)))
        self.loaded.add(target)

    def _add_cache_scale(self, target: str, published: str, scale: torch.Tensor) -> None:
        """A dequantisation multiplier; a cache in the model's dtype has no use for it."""
        value = scale.float().reshape(-1)
        if len(value) != 1 or not torch.isfinite(value).all() or not (value > 0).all():
            raise ValueError(f"the checkpoint's tensor {published} must be one positive number; it is {scale.tolist()}")
        if target in self._parameters:
            _load(self._parameters[target], value[0])
            self.loaded.add(target)


def _load(parameter: nn.Parameter, tensor: torch.Tensor, *part: str | int) -> None:
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor, *part)


def load_checkpoint(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    expected: Mapping[str, Expected],
    *,
    partial: bool = False,
) -> set[str]:
    """Copies a checkpoint's tensors into the model; returns the parameters that got one, for vLLM to check.

    partial: an update of a model that has all its weights. Raises ValueError for a tensor that is missing, too many,
    there twice or of another shape.
    """
    loading = Loading(model, expected)
    for name, tensor in weights:
        loading.add(name, tensor)
    loading.finish(partial=partial)
    return loading.loaded
