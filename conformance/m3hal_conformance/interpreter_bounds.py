"""Lets Triton's CPU interpreter refuse what a GPU may not notice: loads and stores outside of a launch's arguments.

A masked-out element may point anywhere; each other one must lie in the storage of a tensor that the launch was given.
On a GPU such a load reads a neighbour's memory, or faults now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

_BOUND = "_m3hal_bound"


class _Memory:
    """The storages of the launch that is running: where they begin and end, ascending."""

    def __init__(self) -> None:
        self.begins, self.ends = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        self.kernel = ""

    def take(self, kernel: str, arguments: Iterable[Any]) -> None:
        found = sorted({place for argument in arguments for place in _storages(argument)})
        places = np.array(found or [(0, 0)], np.uint64)
        self.kernel, self.begins, self.ends = kernel, places[:, 0], places[:, 1]

    def check(self, what: str, pointers: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], size: int) -> None:
        """Raises IndexError."""
        at = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)].astype(np.uint64)
        if not at.size:
            return
        place = np.searchsorted(self.begins, at, side="right") - 1
        outside = (place < 0) | (at + np.uint64(size) > self.ends[np.maximum(place, 0)])
        if outside.any():
            raise IndexError(
                f"{self.kernel} {what} {int(outside.sum())} of {at.size} elements outside of its arguments' memory"
            )


def _storages(argument: Any) -> Iterator[tuple[int, int]]:
    """Begin and end of what an argument gives access to."""
    if isinstance(argument, (tuple, list)):
        for part in argument:
            yield from _storages(part)
    elif hasattr(argument, "untyped_storage"):
        storage = argument.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    elif hasattr(argument, "base"):  # a descriptor's tensor, or one under another dtype
        yield from _storages(argument.base)


def bound() -> None:
    """Checks every launch from now on; a second call does nothing."""
    import triton.runtime.interpreter as interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    if hasattr(builder, _BOUND):
        return
    setattr(builder, _BOUND, True)
    memory = _Memory()
    executor._init_args_hst = _taking(memory, executor._init_args_hst)
    builder.create_masked_load = _loading(memory, builder.create_masked_load)
    builder.create_masked_store = _storing(memory, builder.create_masked_store)
    builder.create_atomic_rmw = _adding(memory, builder.create_atomic_rmw)


def _taking(memory: _Memory, shipped: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, arguments: Any, options: Any) -> Any:
        given, named = shipped(self, arguments, options)
        memory.take(self.fn.__name__, [*given, *named.values()])
        return given, named

    return init


def _loading(memory: _Memory, shipped: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        memory.check("loads", pointers.data, mask.data, size)
        return shipped(self, pointers, mask, *rest)

    return load


def _storing(memory: _Memory, shipped: Callable[..., Any]) -> Callable[..., Any]:
    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.check("stores", pointers.data, mask.data, value.data.dtype.itemsize)
        return shipped(self, pointers, value, mask, *rest)

    return store


def _adding(memory: _Memory, shipped: Callable[..., Any]) -> Callable[..., Any]:
    def add(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.check("adds to", pointers.data, mask.data, value.data.dtype.itemsize)
        return shipped(self, operation, pointers, value, mask, *rest)

    return add
