"""vLLM's table of models: m3hal's entry, and a net under vLLM's own entries for MiniMax-M3."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.models.registry import _BaseRegisteredModel

from m3hal.vllm.plugin import logger


@dataclass(frozen=True)
class StockOrOurs(_BaseRegisteredModel):
    """The stock class; where vLLM can't even inspect it, m3hal's description stands in until the hook runs.

    vLLM inspects a model before it reads ``additional_config``, and its in-tree M3 can't be inspected without a
    working torchvision, which a CPU install rarely has.
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


def install(published: tuple[str, ...], ours: str, path: str) -> None:
    """Adds m3hal's model as ``ours`` and the net under the published names. Idempotent; other plugins' stay."""
    ModelRegistry.register_model(ours, path)
    for architecture in published:
        entry = ModelRegistry.models.get(architecture)
        if entry is not None and holder(architecture) is None and not isinstance(entry, StockOrOurs):
            ModelRegistry.models[architecture] = StockOrOurs(entry, ModelRegistry.models[ours])


def holder(architecture: str) -> str | None:
    """The module of another plugin's class that holds an architecture; None when it is vLLM's own, or nobody's."""
    entry: Any = ModelRegistry.models.get(architecture)
    if entry is None or isinstance(entry, StockOrOurs):
        return None
    module = str(getattr(entry, "module_name", None) or entry.model_cls.__module__)
    return None if module.partition(".")[0] == "vllm" else module


def stock(architecture: str) -> Any:
    """The entry of an architecture as it was before m3hal."""
    entry = ModelRegistry.models[architecture]
    return getattr(entry, "stock", entry)


def _has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None
