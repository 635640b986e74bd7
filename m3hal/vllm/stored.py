"""Projections of a quantised checkpoint: held as they are stored, computed by the plan's ``linear``.

On GPUs vLLM's own methods for the same formats hold and compute them; it has none for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    MergedColumnParallelLinear,
    MinimaxM3QKVParallelLinearWithIndexer,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from m3hal.formats import FORMATS, QTensor, spec_of
from m3hal.reference import write
from m3hal.vllm import schemes
from m3hal.vllm.schemes import Schemes

#: vLLM's name of the quantisation while m3hal's model serves it
NAME = "m3hal_stored"
#: what these methods hold; FP8 with a scale per channel is vLLM's own on every device
FORMATS_HELD = ("mxfp8", "mxfp4", "nvfp4")


def vllm_computes() -> bool:
    """Whether vLLM has kernels for projections in these formats on this platform."""
    return bool(current_platform.is_cuda_alike())


class StoredConfig(QuantizationConfig):
    """What vLLM asks about each layer. The configuration hook puts it in the place of the checkpoint's own method."""

    def __init__(self, found: Schemes, config: dict[str, Any]) -> None:
        super().__init__()
        self.schemes, self._config = found, config

    def get_name(self) -> Any:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # the plan knows better

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> StoredConfig:
        """Raises ValueError for a quantisation that m3hal does not serve."""
        return cls(schemes.schemes(config), config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if not isinstance(layer, LinearBase):
            return None
        format = self.schemes.of_all(shards(layer, prefix))
        if not format:
            return UnquantizedLinearMethod()
        return self._vllms.get_quant_method(layer, prefix) if vllm_computes() else StoredLinear(format)

    @cached_property
    def _vllms(self) -> Any:
        """vLLM's own description of the checkpoint's layout."""
        from vllm.model_executor.layers.quantization import get_quantization_config

        own = get_quantization_config(_vllms_name(self._config)).from_config(without_prefix(self._config))
        own.packed_modules_mapping = self.packed_modules_mapping
        return own


def _vllms_name(config: dict[str, Any]) -> str:
    if config["quant_method"] != "modelopt":
        return str(config["quant_method"])
    algorithm = str(config.get("quantization", config).get("quant_algo")).upper()
    if algorithm == "MIXED_PRECISION":
        return "modelopt_mixed"
    return "modelopt_mxfp8" if algorithm == "MXFP8" else "modelopt_fp4"


def without_prefix(values: Any) -> Any:
    """A config whose module names are those of m3hal's text model."""
    if isinstance(values, dict):
        return {schemes.bare(key): without_prefix(value) for key, value in values.items()}
    if isinstance(values, list):
        return [without_prefix(value) for value in values]
    return schemes.bare(values) if isinstance(values, str) else values


def shards(layer: nn.Module, prefix: str) -> tuple[str, ...]:
    """The checkpoint's modules that one of vLLM's layers holds."""
    parent, _, name = prefix.rpartition(".")
    if isinstance(layer, MinimaxM3QKVParallelLinearWithIndexer):
        parts: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj")
    elif isinstance(layer, QKVParallelLinear):
        parts = ("q_proj", "k_proj", "v_proj")
    else:
        parts = ("gate_proj", "up_proj") if isinstance(layer, MergedColumnParallelLinear) else (name,)
    return tuple(f"{parent}.{part}" for part in parts)


class StoredLinear(LinearMethodBase):
    """Codes and scales as the checkpoint has them, this rank's part. ``run`` is the plan's ``linear``."""

    def __init__(self, format: str) -> None:
        self.format = format
        self.run: Callable[..., Any] | None = None

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        load, kind, spec = attributes["weight_loader"], FORMATS[self.format], spec_of(self.format)
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        scale_bytes = spec.scale_bytes(columns)  # refuses columns that don't fill groups
        codes = torch.float8_e4m3fn if kind.bits == 8 else torch.uint8
        _add(layer, "weight", torch.empty(rows, spec.data_bytes(columns), dtype=codes), load, input_dim=1)
        _add(layer, "weight_scale", torch.empty(rows, scale_bytes, dtype=torch.uint8), load, input_dim=1)
        if self.format == "nvfp4":  # one for each published matrix, hence one a row

            def spread(param: nn.Parameter, loaded: torch.Tensor, *shard: Any) -> None:
                load(param, loaded.reshape(1, 1).expand(output_size, 1), *shard)

            _add(layer, "weight_scale_2", torch.empty(rows, 1, dtype=torch.float32), spread)

    def process_weights_after_loading(self, layer: Any) -> None:
        codes, scale = layer.weight.data.view(torch.uint8), layer.weight_scale.data
        global_scale = layer.weight_scale_2.data if self.format == "nvfp4" else None
        weight = QTensor(codes, spec_of(self.format), scale, global_scale)
        if not hasattr(layer, "stored"):
            layer.stored = weight
        else:  # weights change while the engine lives: in place, as captured graphs hold addresses
            write(layer.stored, weight)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] -> [T, N]. MiniMax-M3 has no biases."""
        assert self.run is not None
        assert bias is None
        out: torch.Tensor = self.run(x, layer.stored)
        return out


def _add(layer: nn.Module, name: str, data: torch.Tensor, load: Callable[..., Any], **dims: int) -> None:
    parameter: Any = nn.Parameter(data, requires_grad=False)
    for attribute, value in {"output_dim": 0, **dims, "weight_loader": load}.items():
        setattr(parameter, attribute, value)
    layer.register_parameter(name, parameter)
