"""The tensors inside an operator's arguments: they come bare, in tuples, and in the dataclasses of m3hal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in ``value`` with its path, such as ``kv.buf``; anything that is no tensor or container has none."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key, part in _parts(value):
            yield from tensors(part, f"{path}.{key}" if path else key)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor replaced by ``function`` of it. A tensor that occurs twice is replaced once."""
    done: dict[int, Tensor] = {}

    def walk(item: Any) -> Any:
        if isinstance(item, Tensor):
            if id(item) not in done:
                done[id(item)] = function(item)
            return done[id(item)]
        if isinstance(item, (list, tuple)):
            return type(item)(map(walk, item))
        if isinstance(item, dict):
            return {key: walk(part) for key, part in item.items()}
        if is_dataclass(item) and not isinstance(item, type):
            return replace(item, **{key: walk(part) for key, part in _parts(item)})
        return item

    return walk(value)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key), part) for key, part in value.items())
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in fields(value) if field.init)
