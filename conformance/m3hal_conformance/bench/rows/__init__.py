"""The rows of the table: one module for each operator, found by being here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from m3hal_conformance.bench.work import Row

#: bytes of a key, or of a value, of 128 elements with its scales
KEY_BYTES = {"bfloat16": 256, "fp8_e4m3": 128, "nvfp4": 72}
#: formats of caches, each with its short name
FORMATS = {"bfloat16": "bf16", "fp8_e4m3": "fp8", "nvfp4": "nvfp4"}
#: ranks that share the model
RANKS = (1, 4)


def kilo(count: int) -> str:
    """A context for people: 64K."""
    return str(count) if count % 1024 else f"{count // 1024}K"


def operators() -> list[str]:
    """The names of the modules here."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__))


def rows(operator: str, small: bool) -> Iterator[Row]:
    """The rows of one module."""
    yield from importlib.import_module(f"{__name__}.{operator}").rows(small)
