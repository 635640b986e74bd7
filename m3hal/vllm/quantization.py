"""Which quantised checkpoints m3hal's model serves, and ``--quantization m3hal_fp8``, as vLLM's configuration sees it.

vLLM asks for this in every process before it knows the model, so nothing heavy is imported here.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

#: what ``--quantization`` takes to convert an MXFP4 checkpoint's experts to FP8 while it is loaded
NAME = "m3hal_fp8"
_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


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


def expert_format(model_config: Any) -> str | None:
    """The storage format of the routed experts by m3hal's name; None when they are in the model's dtype.

    Raises ValueError, one sentence, for a quantisation that m3hal's model does not serve.
    """
    method = model_config.quantization
    if method is None:
        return None
    found = _as_dict(model_config.model_arch_config.quantization_config)
    if method == NAME:
        return "fp8_e4m3"
    groups = [_as_dict(group) for group in found.get("config_groups", {}).values()]
    fits = len(groups) == 1 and groups[0].get("targets") == ["Linear"]
    for kind, wanted in (("weights", _CHANNEL), ("input_activations", _TOKEN)):
        fits = fits and wanted.items() <= _as_dict(groups[0].get(kind)).items()
    if method != "compressed-tensors" or not fits:
        raise ValueError(
            f"m3hal serves the FP8 experts that `m3hal convert` writes, and an MXFP4 checkpoint with --quantization "
            f"{NAME}; it does not serve quantisation {method!r}"
        )
    return "fp8_e4m3_240" if "fp8_dtype_flavor" in found else "fp8_e4m3"


def _as_dict(values: Any) -> dict[str, Any]:
    return values if isinstance(values, dict) else dict(getattr(values, "__dict__", {}) or {})
