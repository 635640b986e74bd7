"""What vLLM runs in each of its processes before anything else: puts m3hal's model within reach, and changes nothing.

The model gets an architecture name of its own. MiniMax-M3's published names keep meaning vLLM's in-tree classes until
the configuration hook (:mod:`m3hal.vllm.config`), the first place that sees ``additional_config``, finds that m3hal
was asked for and renames the architecture. Workers then resolve the new name like any other.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

#: The published architectures: text alone, and the vision-language wrapper that checkpoints declare.
PUBLISHED = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
#: m3hal's text model, as vLLM's registry knows it; also the name of the class.
OURS = "M3HalForCausalLM"
#: vLLM versions whose internals were read and run; below the second.
SUPPORTED = ((0, 32), (0, 34))

logger = logging.getLogger("vllm.m3hal")


def register() -> None:
    """Entry point ``vllm.general_plugins``. Idempotent; never raises, as that would end vLLM for every model."""
    try:
        _register()
    except Exception as error:
        logger.warning("m3hal is not available in this vLLM: %s: %s", type(error).__name__, error)


def version_refusal(version: str) -> str | None:
    """Why this vLLM is not supported, as a sentence; None when it is."""
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    try:
        release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        release = (0, 0)
    if SUPPORTED[0] <= release < SUPPORTED[1]:
        return None
    return f"vLLM {version} is outside the supported range >={low},<{high}; install a vLLM of that range."


def holder(architecture: str) -> str | None:
    """The module of another plugin's class that the registry holds for an architecture; None: vLLM's own or ours."""
    from vllm import ModelRegistry

    entry = ModelRegistry.models.get(architecture)
    if entry is None or isinstance(entry, _fallback_class()):
        return None
    module = str(getattr(entry, "module_name", None) or entry.model_cls.__module__)
    return None if module.partition(".")[0] == "vllm" else module


def stock_entry(architecture: str) -> Any:
    """The registry's entry for an architecture as it was before m3hal."""
    from vllm import ModelRegistry

    entry = ModelRegistry.models[architecture]
    return getattr(entry, "stock", entry)


def _register() -> None:
    import vllm
    from vllm import ModelRegistry

    from m3hal.vllm import config, quantization

    config.install(PUBLISHED)
    if version_refusal(vllm.__version__):
        return  # the hook says so to whoever asks for m3hal; the registry stays as it is
    quantization.register()
    ModelRegistry.register_model(OURS, f"m3hal.vllm.model:{OURS}")
    fallback = _fallback_class()
    for architecture in PUBLISHED:
        entry = ModelRegistry.models.get(architecture)
        if entry is not None and holder(architecture) is None and not isinstance(entry, fallback):
            ModelRegistry.models[architecture] = fallback(entry, ModelRegistry.models[OURS])


def _has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None


def _fallback_class() -> type:
    """The registry entry class; made once, and only where vLLM can be imported."""
    global _FALLBACK
    if _FALLBACK is None:
        from vllm.model_executor.models.registry import _BaseRegisteredModel

        @dataclass(frozen=True)
        class StockOrOurs(_BaseRegisteredModel):
            """The stock class; where vLLM can't even inspect it, m3hal's description stands in until the hook runs.

            vLLM inspects a model before it reads ``additional_config``, and its in-tree M3 can't be inspected without
            a working torchvision, which a CPU install rarely has.
            """

            stock: Any
            ours: Any

            def inspect_model_cls(self) -> Any:
                if not _has_torchvision():  # spares a 15 s subprocess that can't succeed
                    return self.ours.inspect_model_cls()
                try:
                    return self.stock.inspect_model_cls()
                except Exception as error:
                    logger.debug("vLLM's in-tree MiniMax-M3 can't be inspected: %s", error)
                    return self.ours.inspect_model_cls()

            def load_model_cls(self) -> Any:
                return self.stock.load_model_cls()

        _FALLBACK = StockOrOurs
    return _FALLBACK


_FALLBACK: type | None = None
