"""Operators that ``torch.compile`` sees as one call: it neither looks inside nor needs to."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from m3hal import ops

if TYPE_CHECKING:
    from m3hal.dispatch import Bound

#: The operators that compiled code meets as they are; the others run inside m3hal's own opaque operators.
TRACED = ("rms_norm", "add_rms_norm", "swiglu_oai")

_LIBRARY = torch.library.Library("m3hal", "FRAGMENT")
_CALLS = itertools.count()


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers ``torch.ops.m3hal.<name>``, once per process, when the module that calls this is imported.

    Through ``define`` and ``impl`` rather than ``torch.library.custom_op``, whose wrapper costs 11 to 27 us a call.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, fake, "Meta")


def call(bound: Bound, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` of a core operator that takes and returns tensors, as a torch operator of its own; without ``out``.

    Every rank of an engine makes the same ones in the same order, so their names, which compiled graphs hold, agree.
    """
    operator = ops.load(bound.operator)
    count = str(inspect.signature(operator.fake).return_annotation).count("Tensor")
    returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    inputs = ", ".join(f"Tensor {name}" for name in operator.required)
    name = f"{bound.operator}_{next(_CALLS)}"
    define(f"{name}({inputs}) -> {returns}", run, partial(operator.fake, **operator.static_values(bound.site)))
    made: Callable[..., Any] = getattr(torch.ops.m3hal, name)
    return made
