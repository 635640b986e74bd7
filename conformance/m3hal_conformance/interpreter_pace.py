"""What Triton's interpreter does again for every call and element, done once: two thirds of the time of small kernels.

As shipped (triton 3.6 to 3.9), each call of a device function looks through all of ``triton.language`` for functions to
replace, which the kernel's launch replaced already; each result makes a table of number types anew; and a reduction by
a function of one's own calls it element by element. :func:`hasten` is part of
:func:`m3hal_conformance.interpreter.cure`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

_BRANCHES = (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.Not)


def hasten(interpreter: Any) -> None:
    """Installs the quicker forms in the interpreter's module."""
    interpreter._get_np_dtype = _np_dtype(interpreter, interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = _reduce(interpreter.ReduceOps.generic_reduce)
    _patch_once(interpreter)


def _np_dtype(interpreter: Any, shipped: Callable[[Any], Any]) -> Callable[[Any], Any]:
    kept: dict[str, Any] = {}

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if isinstance(scalar, interpreter.tl.pointer_type):
            return shipped(scalar)
        if scalar.name not in kept:
            kept[scalar.name] = shipped(scalar)
        return kept[scalar.name]

    return get_np_dtype


def _patch_once(interpreter: Any) -> None:
    """Device functions are called while their kernel runs, whose launch has replaced what they use."""
    shipped_patch, shipped_call = interpreter._patch_lang, interpreter.InterpretedFunction.__call__
    language = interpreter.tl
    depth = 0

    @cache
    def used(function: Any) -> tuple[Any, ...]:
        return tuple(m for m in function.__globals__.values() if any(m is lang for lang in (language, language.core)))

    def patch(function: Any) -> Any:
        if depth and all(not language.core.is_builtin(lang.load) for lang in used(function)):
            return interpreter._LangPatchScope() if hasattr(interpreter, "_LangPatchScope") else None
        return shipped_patch(function)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return shipped_call(self, *args, **named)
        finally:
            depth -= 1

    interpreter._patch_lang = patch
    interpreter.InterpretedFunction.__call__ = call


def _reduce(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """A function without branches combines whole slices as it does single elements, in the same order."""

    def generic_reduce(self: Any, given: Any) -> Any:
        if not _is_elementwise(self.combine_fn.fn):
            return shipped(self, given)
        own_axis = self.axis
        arguments, axis = self.unravel(given, own_axis)
        arrays = [argument.handle.data for argument in arguments]

        def slice_of(index: int) -> tuple[Any, ...]:
            pairs = zip(arrays, arguments, strict=True)
            return tuple(self.to_tensor(np.take(array, index, axis), argument.dtype) for array, argument in pairs)

        total = slice_of(0)
        for index in range(1, arrays[0].shape[axis]):
            found = self.combine_fn.fn(*total, *slice_of(index))
            total = found if isinstance(found, tuple) else (found,)
        results = []
        for tensor, argument in zip(total, arguments, strict=True):
            data = tensor.handle.data.reshape(arrays[0].shape[:axis] + arrays[0].shape[axis + 1 :])
            if self.keep_dims:
                ones = range(given[0].handle.data.ndim if own_axis is None else 1)
                for _ in ones:
                    data = np.expand_dims(data, 0 if own_axis is None else axis)
            elif own_axis is None:
                data = data.item()
            results.append(self.to_tensor(data, argument.dtype))
        return results

    return generic_reduce


@cache
def _is_elementwise(function: Any) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return not any(isinstance(node, _BRANCHES) for node in ast.walk(tree))
