"""What an output is compared with: the definition on the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from m3hal.layouts import PagedCache
from m3hal.ops import load
from m3hal_conformance.trees import map_tensors


def exact(name: str, *inputs: Any, **statics: Any) -> Any:
    """The definition in fp64: nothing is rounded but the storage that the inputs were read from.

    Arguments that the operator mutates are converted too, so the caller's stay as they are; pass fp64 caches (of
    :func:`widened`) to look at what was written.
    """
    return load(name).reference(*map(widened, inputs), **statics)


def declared(name: str, traits: Mapping[str, str], *inputs: Any, **statics: Any) -> Any:
    """The definition with an implementation's declared traits, as far as it emulates them, in the inputs' dtypes."""
    operator = load(name)
    emulated = {trait.name for trait in operator.traits if trait.emulated}
    taken = {key: value for key, value in traits.items() if key in emulated}
    return operator.reference(*inputs, **statics, **({"traits": taken} if taken else {}))


def widened(value: Any) -> Any:
    """The value with every floating tensor in fp64; a cache becomes an fp64 cache."""
    if isinstance(value, PagedCache):
        return replace(value, buf=value.buf.double(), layout=replace(value.layout, format="float64"))
    return map_tensors(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor.clone())
