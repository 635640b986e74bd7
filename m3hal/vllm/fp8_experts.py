"""MXFP4 experts that become FP8 while they are loaded: the converter's arithmetic behind vLLM's own weight loaders.

A loader gets codes and scales one after the other, in either order. The first of a pair waits for the second; then the
converted tensors go to the loader that vLLM made, as if they had come from a converted checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.platforms import current_platform

from m3hal.checkpoint.convert.matrix import convert_whole
from m3hal.checkpoint.convert.profiles import GAUDI2, HOPPER, Profile

#: dtypes of MXFP4 codes and scales in a checkpoint
BYTES = (torch.uint8, torch.float8_e8m0fnu)
_WEIGHTS = QuantizationArgs(
    num_bits=8, type=QuantizationType.FLOAT, symmetric=True, strategy=QuantizationStrategy.CHANNEL, dynamic=False
)
_INPUTS = QuantizationArgs(
    num_bits=8, type=QuantizationType.FLOAT, symmetric=True, strategy=QuantizationStrategy.TOKEN, dynamic=True
)


def device_profile() -> Profile:
    """Gaudi 2's window on Gaudi, else OCP's."""
    return GAUDI2 if current_platform.device_type == "hpu" else HOPPER


def to_fp8(
    module: str, codes: torch.Tensor, scales: torch.Tensor, profile: Profile
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [N, K] and fp32 [N, 1], the bytes that ``m3hal convert`` writes. Raises InexactError."""
    data, weight_scale = convert_whole(module, _array(codes), _array(scales), profile)
    return torch.from_numpy(data).view(torch.float8_e4m3fn), torch.from_numpy(weight_scale)


def to_bf16(module: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """BF16 [N, K]. Raises InexactError."""
    return torch.from_numpy(convert_whole(module, _array(codes), _array(scales), None)[0]).view(torch.bfloat16)


class Pairs:
    """Codes and scales that wait for each other."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[bool, torch.Tensor]] = {}

    def add(self, key: Hashable, is_scale: bool, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(codes, scales) when both are there."""
        found = self._waiting.setdefault(key, {})
        found[is_scale] = tensor
        if len(found) < 2:
            return None
        del self._waiting[key]
        return found[False], found[True]


def method_for(layer: torch.nn.Module, prefix: str) -> Any:
    """What vLLM asks of a quantisation: FP8 for routed experts, BF16 for shared ones, nothing for the rest."""
    if isinstance(layer, RoutedExperts):
        return Fp8FromMxfp4(_WEIGHTS, _INPUTS, layer.moe_config)
    if not isinstance(layer, LinearBase):
        return None
    return Bf16FromMxfp4(prefix) if "shared_experts" in prefix else UnquantizedLinearMethod()


class Fp8FromMxfp4(CompressedTensorsW8A8Fp8MoEMethod):
    """vLLM's FP8 experts per channel, in every respect but that their loader also takes MXFP4."""

    def create_weights(self, layer: Any, *args: Any, weight_loader: Callable[..., Any], **kwargs: Any) -> None:
        loader = _ExpertLoader(layer, weight_loader)
        super().create_weights(layer, *args, weight_loader=loader, **kwargs)


class _ExpertLoader:
    """In the place of ``RoutedExperts.weight_loader``."""

    def __init__(self, layer: Any, load: Callable[..., Any]) -> None:
        self._layer, self._load, self._pairs, self._profile = layer, load, Pairs(), device_profile()

    def __call__(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        if loaded_weight.dtype not in BYTES:
            return self._load(param, loaded_weight, weight_name, shard_id, expert_id, return_success)  # type: ignore[no-any-return]
        if self._layer._map_global_expert_id_to_local_expert_id(expert_id) == -1:
            return False if return_success else None  # a rank that filters codes still gets all scales
        pair = self._pairs.add((shard_id, expert_id), weight_name.endswith("_scale"), loaded_weight)
        if pair is not None:
            module = f"{self._layer.layer_name}.{expert_id}.{shard_id}"
            stem = "w2_weight" if shard_id == "w2" else "w13_weight"
            for suffix, tensor in zip(("", "_scale"), to_fp8(module, *pair, self._profile), strict=True):
                target = getattr(self._layer, stem + suffix)
                self._load(target, tensor, stem + suffix, shard_id, expert_id, False)
        return True if return_success else None


class Bf16FromMxfp4(UnquantizedLinearMethod):
    """A plain linear layer whose checkpoint is MXFP4. Its ``weight_scale`` exists only until it is loaded."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        load = kwargs.pop("weight_loader")
        pairs = Pairs()

        def loader(param: torch.nn.Parameter, loaded: torch.Tensor, *shard: Any) -> None:
            if loaded.dtype not in BYTES:
                return load(param, loaded, *shard)  # type: ignore[no-any-return]
            pair = pairs.add(shard, param is layer.weight_scale, loaded)
            if pair is not None:
                load(layer.weight, to_bf16(f"{self._prefix} {shard}", *pair), *shard)

        super().create_weights(layer, *args, weight_loader=loader, **kwargs)
        scale = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        scale.weight_loader = loader  # type: ignore[attr-defined]
        layer.register_parameter("weight_scale", scale)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        del layer.weight_scale
        super().process_weights_after_loading(layer)


def _array(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = tensor.contiguous().view(torch.uint8).cpu().numpy()
    return found
