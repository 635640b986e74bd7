"""Modules that are imported when first used, so that planning and the command line need no torch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Lazy(ModuleType):
    """Stands for a module until the first attribute access, which imports it and takes over its namespace."""

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        self.__dict__.update({key: value for key, value in vars(module).items() if key not in self.__dict__})
        return getattr(module, name)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _Lazy("torch")
