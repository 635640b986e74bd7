"""Which quantised checkpoints m3hal's model serves, and ``--quantization m3hal_fp8``, as vLLM's configuration sees it.

vLLM asks for this in every process before it knows the model, so nothing heavy is imported here.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from m3hal.vllm import published, schemes, stored
from m3hal.vllm.schemes import Schemes

#: what ``--quantization`` takes to convert an MXFP4 checkpoint's experts to FP8 while it is loaded
NAME = "m3hal_fp8"


class M3halFp8Config(QuantizationConfig):
    """An AMD Quark MXFP4 checkpoint, held as FP8 with one power-of-two scale per row; shared experts as BF16.

    It works under any model that vLLM builds of its own layers, and under m3hal's.
    """

    def get_name(self) -> Any:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 89  # the first NVIDIA GPUs that multiply FP8

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> M3halFp8Config:
        """Raises ConversionError unless the checkpoint is Quark's MXFP4."""
        from m3hal.checkpoint.convert.quark import check_quantization

        check_quantization({"quantization_config": config})
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Takes a Quark checkpoint when the user asks for it, and no other and never unasked."""
        return NAME if user_quant == NAME and hf_quant_cfg.get("quant_method") == "quark" else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from m3hal.vllm.fp8_experts import method_for

        return method_for(layer, prefix)


def register() -> None:
    """Idempotent."""
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(M3halFp8Config)
    if stored.NAME not in QUANTIZATION_METHODS:
        register_quantization_config(stored.NAME)(stored.StoredConfig)


def schemes_of(model_config: Any) -> Schemes:
    """How the checkpoint stores its matrices. Raises ValueError for a quantisation that m3hal does not serve."""
    if model_config.quantization is None:
        return Schemes()
    found = model_config.model_arch_config.quantization_config
    return schemes.schemes(found or {"quant_method": f"{model_config.quantization} of an unquantised checkpoint"})


def expert_format(model_config: Any) -> str | None:
    """The format in which the routed experts are held, by m3hal's name; None when they are in the model's dtype.

    Raises ValueError, one sentence, for a quantisation that m3hal's model does not serve, and where layers differ.
    """
    found = schemes_of(model_config)
    formats = {matrix.module: found.of(matrix.module) for matrix in published.matrices(model_config.hf_text_config)}
    experts = {module: format for module, format in formats.items() if ".experts." in module}
    if len(set(experts.values())) > 1:
        found.of_all(experts)
    held = next(iter(experts.values()), "") or None
    if model_config.quantization != NAME:
        return held
    if held != "mxfp4":
        raise ValueError(f"--quantization {NAME} takes an MXFP4 checkpoint of AMD Quark's; these experts are {held}")
    return "fp8_e4m3_240" if current_platform.device_type == "hpu" else "fp8_e4m3"


def projection_format(model_config: Any) -> str | None:
    """The format of the other matrices, by m3hal's name; None when they are in the model's dtype.

    Raises ValueError, one sentence, where the plan's ``linear`` would compute several formats: a plan is for one.
    """
    found = schemes_of(model_config)
    modules = (matrix.module for matrix in published.matrices(model_config.hf_text_config) if matrix.expert is None)
    formats: dict[str, str] = {}
    for module in modules:
        if found.of(module):
            formats.setdefault(found.of(module), module)
    if len(formats) > 1 and computes_projections(model_config):
        told = " and ".join(f"{module} in {format}" for format, module in formats.items())
        raise ValueError(f"the checkpoint stores {told}, but m3hal plans one format of projections; quantise all alike")
    return next(iter(formats), None)


def holds_stored(model_config: Any) -> bool:
    """Whether m3hal's own methods take the checkpoint's layers: all but FP8 with a scale per channel."""
    found = schemes_of(model_config) if model_config.quantization != NAME else Schemes()
    return bool({found.default, *found.listed.values()} & set(stored.FORMATS_HELD))


def computes_projections(model_config: Any) -> bool:
    """Whether the plan's ``linear`` computes at least one projection."""
    if not holds_stored(model_config) or stored.vllm_computes():
        return False
    found = schemes_of(model_config)
    modules = (matrix.module for matrix in published.matrices(model_config.hf_text_config) if matrix.expert is None)
    return any(found.of(module) for module in modules)
