"""Runs a definition as a backend's implementation would run: between guard bands, with ``out`` from the fake."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from m3hal_conformance import map_tensors, run_guarded

from m3hal import ops
from m3hal.layouts import PagedCache
from m3hal.reference import with_out


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def run() -> Callable[..., Any]:
    """``run(name, *inputs, **statics)``: outputs, or ``(outputs, {argument: mutated})`` of an in-place operator."""

    def guarded(name: str, *inputs: Any, **statics: Any) -> Any:
        operator = ops.load(name)
        named = dict(zip(operator.inputs, inputs, strict=False))
        implementation = with_out(partial(operator.reference, **statics))
        return run_guarded(implementation, named, operator.fake(*inputs, **statics), mutates=operator.mutates)

    return guarded


@pytest.fixture
def exact() -> Callable[..., Any]:
    """``exact(name, *inputs, **statics)``: the definition in fp64 on the same numbers, caches included."""

    def in_fp64(name: str, *inputs: Any, **statics: Any) -> Any:
        return ops.load(name).reference(*map(widened, inputs), **statics)

    return in_fp64


def widened(value: Any) -> Any:
    """Every floating tensor in fp64; a cache becomes an fp64 cache."""
    if isinstance(value, PagedCache):
        return replace(value, buf=value.buf.double(), layout=replace(value.layout, format="float64"))
    return map_tensors(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor.clone())
