"""Turns a plan's choice into the callable that a layer keeps."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from m3hal import ops
from m3hal.dispatch.compose import compose
from m3hal.dispatch.errors import M3halError
from m3hal.dispatch.manifest import Kernel
from m3hal.dispatch.screen import Candidate
from m3hal.dispatch.vendor import Failure, attempt
from m3hal.dispatch.watch import watched
from m3hal.shape import Site

if TYPE_CHECKING:
    from torch import Tensor

    from m3hal.dispatch.plans import Choice, Plan


@dataclass(frozen=True)
class Bound:
    """An operator at a site, ready to run.

    run is the vendor's own callable: no lookup, lock or guard stands before it. Only where the policy watches calls is
    it another, and ``unwatched`` the vendor's. The other callables are those of :class:`m3hal.Kernel`. traits: what the
    implementation declared, or, for a composition, its parts together.
    """

    operator: str
    site: Site
    run: Callable[..., Any]
    backend: str
    impl_id: str
    workspace_bytes: int = 0
    plan_batch: Callable[[Any, Tensor | None], Any] | None = None
    plan_bytes: int = 0
    prepare_weights: Callable[[Any], Any] | None = None
    update_weights: Callable[[Any, int, Any], None] | None = None
    unpack: Callable[[Any], Any] | None = None
    traits: Mapping[str, str] = field(default_factory=dict)
    traceable: bool = True
    unwatched: Callable[..., Any] | None = None


def bind(plan: Plan, choice: Choice, layer: str = "") -> Bound:
    """Binds one row of a plan for a layer; see :meth:`m3hal.dispatch.plans.Plan.bind`."""
    where = f"{choice.operator} at {choice.site}" if choice.site else choice.operator
    if choice.engine:
        raise M3halError(f"{where} can't be bound: the engine {choice.engine} holds it.")
    if choice.chosen:
        candidate = choice.chosen
        bound = plan.bound_once(choice, lambda: _bind_chosen(candidate, plan.site(choice.site)))
    elif choice.composed:
        bound = _bind_composed(plan, choice, layer)
    else:
        raise M3halError(f"{where} can't be bound: {choice.reason}.", choice.verdicts)
    return watched(bound, plan.policy.watch, layer) if plan.policy.watch.is_on else bound


def _bind_chosen(candidate: Candidate, site: Site) -> Bound:
    made = _call_factory(candidate, site)
    kernel = made if isinstance(made, Kernel) else Kernel(made)
    problem = _problem_of(kernel, candidate)
    if problem:
        raise M3halError(f"{_whose(candidate, site)}: {problem}.")
    return Bound(
        operator=candidate.operator,
        site=site,
        backend=candidate.backend,
        impl_id=candidate.impl_id,
        traits=dict(candidate.impl.traits),
        traceable=candidate.impl.traceable,
        **{name: getattr(kernel, name) for name in _KERNEL},
    )


_KERNEL = ("run", "workspace_bytes", "plan_batch", "plan_bytes", "prepare_weights", "update_weights", "unpack")


def _call_factory(candidate: Candidate, site: Site) -> Any:
    made = attempt(lambda: pkgutil.resolve_name(candidate.impl.path)(site))
    if isinstance(made, Failure):
        raise M3halError(
            f"{_whose(candidate, site)} although its manifest and probe say it serves it: "
            f"{candidate.impl.path} {made.reason}. Nothing falls back; "
            f"choose another backend with operators.{candidate.operator}, or deny {candidate.backend}."
        ) from made.error
    return made


def _whose(candidate: Candidate, site: Site) -> str:
    origin = f"{candidate.distribution} {candidate.version}".strip()
    return f"backend {candidate.backend!r} ({origin}) can't bind {candidate.operator} at {site.kind}"


def _problem_of(kernel: Kernel, candidate: Candidate) -> str | None:
    """What is wrong with what a factory returned."""
    if not callable(kernel.run):
        return f"{candidate.impl.path} returned {kernel.run!r}; it must return a callable or a m3hal.Kernel"
    for name in ("plan_batch", "prepare_weights", "update_weights", "unpack"):
        given = getattr(kernel, name)
        if given is not None and not callable(given):
            return f"its {name} is {given!r}; it must be a callable or None"
    for name in ("workspace_bytes", "plan_bytes"):
        size = getattr(kernel, name)
        if not isinstance(size, int) or size < 0:
            return f"its {name} is {size!r}; it must be a number of bytes, 0 or more"
    return None


def _bind_composed(plan: Plan, choice: Choice, layer: str) -> Bound:
    operator, site = ops.load(choice.operator), plan.site(choice.site)
    parts = {name: plan.bind(name, choice.site, layer) for name in choice.composed}
    traits: dict[str, str] = {}
    if plan.is_definition(choice):
        from m3hal.reference import bind_definition

        kernel = Kernel(bind_definition(operator, site))
    else:
        kernel = compose(operator, site, parts)
        vocabulary = {trait.name for trait in operator.traits}
        declared = [pair for part in parts.values() for pair in part.traits.items()]
        traits = {**operator.composed_traits, **{name: value for name, value in declared if name in vocabulary}}
    return Bound(
        operator=operator.name,
        site=site,
        backend="+".join(dict.fromkeys(part.backend for part in parts.values())),
        impl_id=plan.impl_id(choice),
        traits=traits,
        **{name: getattr(kernel, name) for name in _KERNEL},
    )
