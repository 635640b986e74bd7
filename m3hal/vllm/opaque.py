"""Operators that ``torch.compile`` sees as one call: it neither looks inside nor needs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("m3hal", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers ``torch.ops.m3hal.<name>``, once per process, when the module that calls this is imported.

    Through ``define`` and ``impl`` rather than ``torch.library.custom_op``, whose wrapper costs 11 to 27 us a call.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, fake, "Meta")
