"""Puts backends to a device and implementations to a site, one stage after the other; each answer is a verdict.

Nothing that a vendor wrote can crash a plan: what raises or exits is rejected at its stage with the reason.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from m3hal import ops
from m3hal.dispatch import devices, symbols, versions
from m3hal.dispatch.check import gap_in_ladder, problem_of_impl, unknown_operators
from m3hal.dispatch.discovery import REFERENCE, Found
from m3hal.dispatch.errors import nearest
from m3hal.dispatch.identity import MissingFileError, impl_id
from m3hal.dispatch.libraries import libraries
from m3hal.dispatch.manifest import API_VERSION, Impl
from m3hal.dispatch.names import LEVELS, BackendName
from m3hal.dispatch.vendor import Failure, attempt
from m3hal.dispatch.verdict import Stage, Verdict
from m3hal.shape import Site


@dataclass(frozen=True)
class Candidate:
    """One implementation of one operator, well-formed and identified.

    stale: the command that says which files changed, where claims tell that it ran with others; "" where none does.
    """

    operator: str
    backend: str
    distribution: str
    version: str
    impl: Impl
    impl_id: str
    level: str
    priority: int
    stale: str = ""

    @property
    def label(self) -> str:
        """The implementation's own name, else its factory's."""
        return self.impl.name or self.impl.path.rpartition(":")[2]

    def verdict(self, stage: Stage, accepted: bool, reason: str, site: str = "") -> Verdict:
        """A verdict about this implementation."""
        return Verdict(stage, accepted, reason, self.backend, self.distribution, self.operator, site, self.label)

    def is_from(self, name: BackendName) -> bool:
        """Whether a name in a policy means this implementation's backend."""
        return name.matches(self.backend, self.distribution)


@dataclass(frozen=True)
class Demands:
    """What is asked of an implementation.

    require: (trait, value). by_name: the policy names its backend, rather than leaving the choice to ``auto``.
    accelerated: the device is none that the reference serves unasked.
    """

    require: tuple[tuple[str, str], ...]
    min_level: str | None
    by_name: bool
    accelerated: bool
    device: str


def screen_backend(found: Found, device: str, present: bool) -> Found:
    """The backend with its verdict: api, device, libraries, probe."""
    if not found.is_usable or found.manifest is None:
        return found
    manifest = found.manifest
    spoken = ".".join(map(str, API_VERSION))
    if not versions.satisfies(spoken, manifest.api):
        return found.rejected("api", f"it was written for backend API {manifest.api}; this m3hal speaks {spoken}")
    if not devices.matches(device, manifest.devices):
        return found.rejected("device", f"it runs on {', '.join(manifest.devices)}; not on {device}")
    if not present:
        wanted = ", ".join(f"{name} {range_}" for name, range_ in manifest.libraries.items())
        assumed = f"; {wanted} assumed" if wanted else ""
        return _usable(found, f"this machine has no {device}: not probed{assumed}")
    needed = libraries(manifest)
    for library in needed:
        if library.problem:
            return found.rejected("library", library.problem)
    having = f"; it calls {', '.join(f'{library.name} {library.installed}' for library in needed)}" if needed else ""
    if manifest.probe is None:
        return _usable(found, f"it needs no probe{having}")
    problem, trace = _ask(manifest.probe, device)
    if problem:
        return found.rejected("probe", problem, trace)
    return _usable(found, f"its probe finds {device} usable{having}")


def _usable(found: Found, reason: str) -> Found:
    return replace(found, verdict=Verdict("chosen", True, reason, found.name, found.distribution))


def _ask(path: str, argument: Any) -> tuple[str | None, str]:
    """Calls a vendor's probe or predicate: (why not, traceback). It must answer None or a reason."""
    answer = attempt(lambda: pkgutil.resolve_name(path)(argument))
    if isinstance(answer, Failure):
        return f"{path} {answer.reason}", answer.traceback
    if answer is None or (isinstance(answer, str) and answer):
        return answer, ""
    return f"{path} returned {answer!r}; it must return None or the reason for refusing", ""


def candidates(
    found: Found, operators: Mapping[str, ops.Operator], levels: Mapping[str, str]
) -> tuple[list[Candidate], list[Verdict]]:
    """The well-formed implementations of a usable backend, and verdicts on what its manifest got wrong.

    A fault costs only the implementation that has it. What bears a name that is no operator's counts as a fault of the
    operator that it is a near miss of, so that this one isn't called absent.
    """
    assert found.manifest is not None
    good: list[Candidate] = []
    seen: dict[tuple[str, str], str] = {}
    bad = [
        Verdict("manifest", False, problem, found.name, found.distribution, nearest(name, ops.NAMES) or name)
        for name, problem in unknown_operators(found.manifest)
    ]
    for name, operator in operators.items():
        impls = found.manifest.operators.get(name, ())
        if not isinstance(impls, tuple):
            reason = f"operators[{name!r}] must be a tuple of Impl; it is a {type(impls).__name__}"
            bad.append(Verdict("manifest", False, reason, found.name, found.distribution, name))
            continue
        for impl in impls:
            made = _candidate(found, operator, impl, levels, seen)
            if isinstance(made, Candidate):
                good.append(made)
            else:
                names = (getattr(impl, part, None) for part in ("name", "path"))
                label = next((name for name in names if type(name) is str and name), "").rpartition(":")[2]
                bad.append(Verdict("manifest", False, made, found.name, found.distribution, name, "", label))
    return good, bad


def _candidate(
    found: Found, operator: ops.Operator, impl: Impl, levels: Mapping[str, str], seen: dict[tuple[str, str], str]
) -> Candidate | str:
    """The implementation, or what its entry in the manifest got wrong."""
    problem = attempt(problem_of_impl, impl, operator)
    if isinstance(problem, Failure):
        return f"looking at its entry {problem.reason}"
    if problem:
        return problem
    try:
        identity = impl_id(operator.name, impl, seen)
    except MissingFileError as error:
        return str(error)
    level = levels.get(identity, LEVELS[0])
    assert found.manifest is not None
    priority = found.manifest.priority
    return Candidate(operator.name, found.name, found.distribution, found.version, impl, identity, level, priority)


def screen(candidate: Candidate, operator: ops.Operator, site: Site, demands: Demands) -> Verdict:
    """One implementation at one site: policy, device, library, limits with the ladder, predicate, traits, level."""
    for stage, check in _STAGES:
        reason = check(candidate, operator, site, demands)
        if reason:
            return candidate.verdict(stage, False, reason, site.kind)
    return candidate.verdict("chosen", True, "every stage passed", site.kind)


def _limits(candidate: Candidate, operator: ops.Operator, site: Site, demands: Demands) -> str | None:
    for limit in candidate.impl.limits:
        try:
            reason = limit.refusal(getattr(site, limit.attribute))
        except Exception as error:
            reason = f"its limit on {limit.attribute} raised {type(error).__name__}: {error}"
        if reason:
            return reason
    return _unmentioned(candidate, operator, site) or gap_in_ladder(candidate.impl.rungs, site.max_tokens)


def _unmentioned(candidate: Candidate, operator: ops.Operator, site: Site) -> str | None:
    """What the site asks beyond the usual, of an implementation that was written without knowing that there is such."""
    mentioned = {limit.attribute for limit in candidate.impl.limits}
    for name in operator.optional:
        value = getattr(site, name)
        if value and name not in mentioned:
            return f"{name} is {value!r}; its limits do not mention {name}, so it takes {type(value)()!r} alone"
    return None


def _predicate(candidate: Candidate, operator: ops.Operator, site: Site, demands: Demands) -> str | None:
    return _ask(candidate.impl.predicate, site)[0] if candidate.impl.predicate else None


def _traits(candidate: Candidate, operator: ops.Operator, site: Site, demands: Demands) -> str | None:
    for name, wanted in demands.require:
        vocabulary = next((trait.values for trait in operator.traits if trait.name == name), None)
        if vocabulary is None:
            continue
        has = candidate.impl.traits.get(name, vocabulary[0])
        if has != wanted:
            return f"the policy requires {name}={wanted}; it declares {has}"
    return None


def _unasked(candidate: Candidate, operator: ops.Operator, site: Site, demands: Demands) -> str | None:
    """What ``auto`` never takes."""
    if demands.by_name:
        return None
    if candidate.priority < 0:
        return "its priority is negative: it serves only when asked for by name"
    if candidate.backend == REFERENCE and demands.accelerated:
        return "the reference serves an accelerator only when asked for by name"
    return None


def _device(candidate: Candidate, operator: ops.Operator, site: Site, demands: Demands) -> str | None:
    served = candidate.impl.devices
    if served and not devices.matches(demands.device, served):
        return f"it runs on {', '.join(served)}; not on {demands.device}"
    return None


def _library(candidate: Candidate, operator: ops.Operator, site: Site, demands: Demands) -> str | None:
    """Whether what it calls is as it was; asked of a library that is installed, on whatever machine."""
    for symbol in filter(symbols.is_installed, candidate.impl.calls):
        problem = symbols.difference(symbol)
        if problem:
            return (
                f"{problem}; install another version of the library or a newer {candidate.distribution}, "
                f"or choose another backend with operators.{operator.name}"
            )
    return None


def _level(candidate: Candidate, operator: ops.Operator, site: Site, demands: Demands) -> str | None:
    least = demands.min_level
    if least is None or candidate.backend == REFERENCE:  # it is what the levels are measured against
        return None
    if LEVELS.index(candidate.level) < LEVELS.index(least):
        if candidate.stale:
            return f"stale: it ran with other files, see `{candidate.stale}`; the policy asks for {least!r}"
        return f"it is proved to the level {candidate.level!r}; the policy asks for {least!r}"
    return None


_Check = Callable[[Candidate, ops.Operator, Site, Demands], "str | None"]
_STAGES: tuple[tuple[Stage, _Check], ...] = (
    ("policy", _unasked),
    ("device", _device),
    ("library", _library),
    ("limits", _limits),
    ("predicate", _predicate),
    ("traits", _traits),
    ("level", _level),
)
