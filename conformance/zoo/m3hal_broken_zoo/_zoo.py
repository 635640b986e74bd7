"""How a mutant is written: the definition with one thing wrong, and the named check that must catch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from m3hal_conformance.case import DTYPES

from m3hal import ops
from m3hal.dispatch import Impl, Kernel, Manifest
from m3hal.layouts import PAGE_MAPS
from m3hal.reference import bind_definition, with_out
from m3hal.shape import Site

Factory = Callable[[Site], Any]


@dataclass(frozen=True)
class Mutant:
    """A wrong implementation.

    killed_by: ``case:check``, the case without operator and format. bug: the public case it comes from, if any.
    formats: of activations, in which it is wrong. declares: fields of its Impl; a mutant is opaque to torch.compile and
    allocates for itself, unless it says otherwise, so that only what is wrong with it counts.
    """

    operator: str
    name: str
    factory: Factory
    killed_by: str
    bug: str
    sentence: str
    formats: tuple[str, ...] = DTYPES
    declares: Mapping[str, Any] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """The name of the backend that holds it."""
        return f"zoo-{self.operator}-{self.name}".replace("_", "-")

    def manifest(self) -> Manifest:
        layouts = PAGE_MAPS if ops.load(self.operator).group == "cache" else ()
        declared = {"memory": "self", "traceable": False, "files": ("*.py",), **self.declares}
        impl = Impl(f"{self.factory.__module__}:{self.factory.__name__}", layouts=layouts, **declared)
        return Manifest(
            name=self.backend,
            vendor="m3hal broken zoo",
            api=">=1,<2",
            priority=-1,
            devices=("cpu",),
            operators={self.operator: (impl,)},
        )


MUTANTS: list[Mutant] = []


def mutant(
    operator: str,
    killed_by: str,
    bug: str = "",
    *,
    raw: bool = False,
    formats: tuple[str, ...] = DTYPES,
    declares: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[Callable[..., Any]], Factory]:
    """Registers ``function(site, right)``, which returns the wrong callable; ``right`` is the definition at the site.

    raw: the callable handles ``out=`` itself, or is a Kernel. formats, declares: see :class:`Mutant`.
    """

    def register(function: Callable[..., Any]) -> Factory:
        def factory(site: Site) -> Any:
            wrong = function(site, bind_definition(ops.load(operator), site))
            return wrong if raw or isinstance(wrong, Kernel) else with_out(wrong)

        factory.__name__, factory.__module__ = function.__name__, function.__module__
        factory.__wrapped__ = function  # type: ignore[attr-defined]  # its source is the mutant's
        name = function.__name__.removeprefix(f"{operator}_")
        MUTANTS.append(
            Mutant(operator, name, factory, killed_by, bug, (function.__doc__ or "").strip(), formats, declares)
        )
        return factory

    return register
