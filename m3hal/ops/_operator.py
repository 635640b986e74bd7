"""What an operator is: a named function with one definition."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from m3hal.shape import SiteKind


@dataclass(frozen=True)
class Trait:
    """A numeric freedom that vendors legitimately take.

    values: the closed vocabulary; the first is exact, what an implementation that declares nothing is held to.
    emulated: the reference takes the trait and reproduces it; otherwise it only widens the tolerance.
    """

    name: str
    values: tuple[str, ...]
    emulated: bool
    meaning: str


@dataclass(frozen=True)
class Numeric:
    """How an output is compared with the definition.

    X: bit-exact. U1: within one unit in the last place of a bf16 output; fp32 outputs, whose order of summation is
    free, within a row bound. C1: within one code step. R: worst-row relative L2 error within a bound derived from a
    legitimate low-precision evaluation. S: a selection, compared by score regret.
    """

    kind: Literal["X", "U1", "C1", "R", "S"]
    note: str = ""


@dataclass(frozen=True)
class Operator:
    """A named function with one definition.

    reference: the definition, functional except for the arguments named in ``mutates``. Positional parameters arrive
        per step, those that default to None only where the site says so; keyword-only parameters are static and are
        attributes of :class:`m3hal.Site` by the same name. It computes in fp32, or in fp64 when its inputs are fp64,
        and rounds once, to the dtype of its output.
    fake: same parameters, returns empty outputs of the right shape, dtype and strides (``torch.empty``-like); what
        implementations get as ``out`` and what ``torch.compile`` sees.
    compose: for fused operators: takes the callables of the core operators it ``covers``, by name, each bound to its
        static values, plus this operator's own static values; returns a callable of the positional parameters.
        ``reference`` is then ``compose`` over the references.
    composed_traits: what a composition declares beside its parts' traits, because parts round between themselves.
    prepare: makes a composition's ``prepare_weights`` of its part's, where they are not the same.
    sites: where in the model it runs. group: operators that share bytes and are chosen together.
    optional: attributes of Site that say what more than the usual is asked: 0, False or "" where nothing is. An
        implementation whose limits do not mention one is asked only where nothing is.
    source: where the definition comes from.
    """

    name: str
    kind: Literal["core", "fused"]
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    numeric: Numeric
    sites: tuple[SiteKind, ...]
    source: str
    traits: tuple[Trait, ...] = ()
    mutates: tuple[str, ...] = ()
    group: Literal["cache", "weight", None] = None
    covers: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    compose: Callable[..., Callable[..., Any]] | None = field(default=None)
    composed_traits: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Callable[[Any], Any]], Callable[[Any], Any]] | None = field(default=None)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the positional parameters, in order."""
        return tuple(p.name for p in self._parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    @cached_property
    def required(self) -> tuple[str, ...]:
        """Names of the positional parameters that every call has, in order; the others may be left out or None."""
        return tuple(p.name for p in self._parameters if p.name in self.inputs and p.default is p.empty)

    @cached_property
    def statics(self) -> tuple[str, ...]:
        """Names of the static parameters, each an attribute of Site."""
        return tuple(p.name for p in self._parameters if p.kind is p.KEYWORD_ONLY and p.name != "traits")

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.reference).parameters.values())

    def static_values(self, site: Any) -> Mapping[str, Any]:
        """The definition's static arguments at a site."""
        return {name: getattr(site, name) for name in self.statics}
