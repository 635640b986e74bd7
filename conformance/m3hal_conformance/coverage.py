"""Coverage of what is declared: both sides of every limit are tried, and what nobody asked about is named.

A limit that says yes must run: the smallest case of the operator is asked again with the site's attribute at the edge
of the limit. Beyond the edge the implementation is tried as well, past its own manifest: that it works there is a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from m3hal import ops
from m3hal.dispatch import Bound, Impl, Kernel, Limit, M3halError
from m3hal.shape import SITE_ATTRIBUTES, Site
from m3hal_conformance.case import Case
from m3hal_conformance.results import Result
from m3hal_conformance.runner import Runner
from m3hal_conformance.trees import tensors
from m3hal_conformance.trial import Unsupported

#: attributes that may have another value by themselves, wherever a case follows it
_PROBED = ("page_size", "top_k_blocks", "top_k_experts", "num_q_heads", "index_dim")
_CHECKS = ("oracle", "guards", "written")


@dataclass(frozen=True)
class Probe:
    """One value of a limited attribute. inside: whether the manifest accepts it."""

    limit: Limit
    value: Any
    inside: bool


def cover(runner: Runner, cases: Sequence[Case], results: Sequence[Result]) -> tuple[dict[str, Any], list[Result]]:
    """Notes on what was declared and not tried, or works undeclared; and a result for each probe inside a limit."""
    notes: list[str] = []
    extra: list[Result] = []
    met = _met(cases, results)
    unasked: dict[str, list[str]] = {}
    for case, impl in _smallest(runner, cases):
        for probe in probes(impl, case.site):
            attribute, value = probe.limit.attribute, probe.value
            if (case.operator, attribute, value) in met:
                continue
            if attribute in _PROBED and _sensible(case.site, attribute, value) and _follows(case, attribute, value):
                _ask(runner, case, impl, probe, notes, extra)
            elif probe.inside:
                unasked.setdefault(case.operator, []).append(f"{attribute} = {value!r}")
    for operator, found in unasked.items():
        notes.append(f"{operator}: declared, and no case asks about it: {', '.join(dict.fromkeys(found))}")
    notes += list(_unmet(runner, cases, results))
    notes += list(_unused_freedoms(runner, cases))
    return {"notes": list(dict.fromkeys(notes)), "probes": len(extra)}, extra


def probes(impl: Impl, site: Site) -> Iterator[Probe]:
    """Values on both sides of each limit; only of attributes that a case's inputs follow."""
    for limit in impl.limits:
        here = getattr(site, limit.attribute)
        for value in _values(limit, here):
            if value != here:
                yield Probe(
                    limit, value, all(x.refusal(value) is None for x in impl.limits if x.attribute == limit.attribute)
                )


def _values(limit: Limit, here: Any) -> list[Any]:
    if limit.values:
        return list(limit.values)
    found: list[Any] = []
    if limit.maximum is not None:
        found += [int(limit.maximum), int(limit.maximum) + 1]
    if limit.minimum is not None:
        found += [int(limit.minimum), int(limit.minimum) - 1]
    if limit.multiple is not None:
        found += [limit.multiple, here + limit.multiple, here + 1]
    return found


def _met(cases: Sequence[Case], results: Sequence[Result]) -> set[tuple[str, str, Any]]:
    """(operator, attribute, value) of the sites whose cases ran."""
    ran = {result.case for result in results if result.status in ("pass", "fail", "waived")}
    return {(c.operator, name, getattr(c.site, name)) for c in cases if c.id in ran for name in SITE_ATTRIBUTES}


def _ask(runner: Runner, case: Case, impl: Impl, probe: Probe, notes: list[str], extra: list[Result]) -> None:
    """Runs a case at one value of an attribute; outside the limit, past the manifest."""
    attribute, value = probe.limit.attribute, probe.value
    name = f"{case.operator}/limit_{attribute}_{value}/{case.format}"
    probed = replace(case, id=name, site=replace(case.site, **{attribute: value}), checks=_CHECKS, golden=None)
    if probe.inside:
        result = runner.run_case(probed)
        if result.status == "unsupported":
            notes.append(f"{case.operator}: {attribute} = {value!r} is inside its limit but not bound: {result.reason}")
        else:
            extra.append(result)
    elif _works(runner, probed, impl):
        notes.append(
            f"{case.operator}: {attribute} = {value!r} is refused by its limit, yet it computes the operator there"
        )


def _sensible(site: Site, attribute: str, value: Any) -> bool:
    if not isinstance(value, int) or value < 1:
        return False
    if attribute == "num_q_heads":
        return site.num_kv_heads > 0 and value % site.num_kv_heads == 0 and value <= 256
    if attribute == "top_k_blocks":
        return value >= site.init_blocks + site.local_blocks and value <= 256
    if attribute == "top_k_experts":
        return value <= site.num_experts
    return value <= 1024


def _follows(case: Case, attribute: str, value: Any) -> bool:
    """Whether a case asks another question there: the definition takes the value, or it gives the inputs' shapes.

    The ids of moe_experts have a width of their own: a probe of its top_k_experts would ask the same again.
    """
    definition, here = ops.load(case.operator), case.inputs()
    try:
        there = replace(case, site=replace(case.site, **{attribute: value})).inputs()
    except (IndexError, RuntimeError, ValueError):  # inputs made for one value
        return False
    return attribute in definition.static_values(case.site) or _shapes(here) != _shapes(there)


def _shapes(inputs: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(path, tuple(tensor.shape)) for path, tensor in tensors(inputs)]


def _works(runner: Runner, case: Case, impl: Impl) -> bool:
    """Whether the factory, called past its own limits, gives something that passes."""
    import pkgutil

    from m3hal_conformance.checks import CHECKS
    from m3hal_conformance.trial import Trial

    try:
        made = pkgutil.resolve_name(impl.path)(case.site)
        kernel = made if isinstance(made, Kernel) else Kernel(made)
        names = ("run", "workspace_bytes", "plan_batch", "plan_bytes", "prepare_weights", "update_weights", "unpack")
        parts = {name: getattr(kernel, name) for name in names}
        bound = Bound(case.operator, case.site, backend=runner.backend, impl_id="", traits=dict(impl.traits), **parts)
        trial = Trial(case, bound, runner.torch_device, impl, runner.seed)
        for name in case.checks:
            CHECKS[name](trial)
    except (Exception, SystemExit):
        return False
    return True


def _smallest(runner: Runner, cases: Sequence[Case]) -> Iterator[tuple[Case, Impl]]:
    """For each implementation that bound: the first quick case it ran."""
    seen: set[str] = set()
    for case in cases:
        try:
            offer = runner.offer(case.operator, case.site, case.layout)
        except Unsupported:
            continue
        if offer.impl is not None and offer.bound.impl_id not in seen and case.quick and offer.impl.limits:
            seen.add(offer.bound.impl_id)
            yield case, offer.impl


def _unmet(runner: Runner, cases: Sequence[Case], results: Sequence[Result]) -> Iterator[str]:
    """Implementations that a manifest lists and that no case bound."""
    ran = {result.impl_id for result in results if result.impl_id}
    listed: dict[str, str] = {}
    for case in cases:
        try:
            made = runner.plan(case.operator, case.site, case.layout)
        except M3halError:
            continue
        for found in made.backends:
            if found.manifest is not None and found.name in runner.backend.split(","):
                for operator, impls in found.manifest.operators.items():
                    for impl in impls if isinstance(impls, tuple) else ():
                        if not isinstance(impl, Impl) or not isinstance(impl.name, str):
                            continue
                        listed[f"{operator} {impl.name or impl.path}"] = operator
        break
    operators = {result.operator for result in results if result.impl_id in ran and result.impl_id}
    asked = {case.operator for case in cases}
    for name, operator in listed.items():
        if operator in asked and operator not in operators:
            yield f"{name} is declared, and no case could be asked of it"


def _unused_freedoms(runner: Runner, cases: Sequence[Case]) -> Iterator[str]:
    """Declared traits of implementations that stayed within the bound for no freedoms in every comparison."""
    seen: set[str] = set()
    for case in cases:
        try:
            bound = runner.offer(case.operator, case.site, case.layout).bound
        except Unsupported:
            continue
        traits = {k: v for k, v in bound.traits.items() if k != "batch_invariant"}
        if traits and bound.impl_id not in seen and bound.impl_id not in runner.needed_freedom:
            names = ", ".join(f"{k}={v}" for k, v in traits.items())
            yield f"{case.operator}: it declares {names}, and stays within the bound for no freedoms everywhere"
        seen.add(bound.impl_id)
