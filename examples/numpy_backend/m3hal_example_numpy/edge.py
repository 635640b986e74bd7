"""Where tensors become arrays: the only file here that knows torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from m3hal import Site
from m3hal.ops import load


def numpy_kernel(kernel: Callable[..., None]) -> Callable[[Site], Callable[..., Any]]:
    """Makes a factory for the operator that ``kernel`` is named after.

    The kernel takes the operator's inputs as arrays, then the arrays to write, then its static values by keyword.
    """
    operator = load(kernel.__name__)

    def factory(site: Site) -> Callable[..., Any]:
        statics = operator.static_values(site)

        def run(*inputs: torch.Tensor, out: Any = None) -> Any:
            result = operator.fake(*inputs, **statics) if out is None else out
            written = result if isinstance(result, tuple) else (result,)
            # Tensor.numpy() shares the tensor's memory and keeps its strides: nothing is copied on the way in or out.
            kernel(*(tensor.numpy() for tensor in (*inputs, *written)), **statics)
            return result

        return run

    return factory
