"""What a request names, checked before anything is planned: operators, traits, backends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from m3hal import ops
from m3hal.dispatch import devices, watch
from m3hal.dispatch.discovery import Found, discover
from m3hal.dispatch.errors import ConfigurationError, UnsupportedError, did_you_mean
from m3hal.dispatch.names import LEVELS, RESERVED, BackendName
from m3hal.dispatch.policy import Policy

#: backends that a pip extra of the core installs
_EXTRAS = ("nvidia", "amd", "gaudi", "triton")


def operators_named(names: Iterable[str] | None) -> dict[str, ops.Operator]:
    """The definitions to plan for, core ones first; fused ones bring what they cover. None names all."""
    asked = list(ops.NAMES if names is None else names)
    for name in asked:
        if name not in ops.NAMES:
            raise ConfigurationError(f"{name!r} is no operator.{did_you_mean(name, ops.NAMES)}")
    every = set(asked) | {part for name in asked for part in ops.covered(name)}
    return {name: ops.load(name) for name in ops.NAMES if name in every}


def check_policy(policy: Policy, engine: Mapping[str, str], levels: Mapping[str, str]) -> None:
    """Overrides of operators that m3hal serves, traits and levels that exist."""
    for operator in policy.overrides:
        if operator in engine:
            holder = engine[operator]
            raise ConfigurationError(
                f"the policy overrides {operator}, but the engine {holder} holds it; remove operators.{operator}."
            )
    vocabulary: dict[str, set[str]] = {}
    for name in ops.NAMES:
        for trait in ops.load(name).traits:
            vocabulary.setdefault(trait.name, set()).update(trait.values)
    for name, value in policy.require:
        if name not in vocabulary:
            raise ConfigurationError(
                f"the policy requires {name!r}, which is no trait.{did_you_mean(name, vocabulary)}"
            )
        if value not in vocabulary[name]:
            raise ConfigurationError(
                f"the policy requires {name}={value}; the values of {name} are {', '.join(sorted(vocabulary[name]))}."
            )
    watch.check(policy.watch)
    unknown = set(levels.values()) - set(LEVELS)
    if unknown:
        raise ConfigurationError(f"{sorted(unknown)[0]!r} is no verification level; levels are {', '.join(LEVELS)}.")


def refusal(policy: Policy, name: str, distribution: str) -> str | None:
    """Why the policy keeps a backend out, by its name alone; None lets it in."""
    if any(denied.matches(name, distribution) for denied in policy.deny):
        return f"deny {policy.told('deny')}"
    named = policy.named()
    if any(wanted.matches(name, distribution) for wanted in named):
        return None
    if policy.in_tree or policy.order:
        return f"not asked for: backend {policy.told('backend')}"
    # Under auto, a rival of the same name stays out when the policy says which distribution it means.
    rivals = [wanted for wanted in named if wanted.name == name]
    return f"the policy names {rivals[0]}" if rivals else None


def further_kinds(policy: Policy) -> list[str]:
    """Kinds of devices that m3hal can't look for, and that a manifest which the policy admits names."""
    admitted = discover(lambda name, distribution: refusal(policy, name, distribution))
    named = {devices.kind(pattern) for found in admitted if found.manifest for pattern in found.manifest.devices}
    return sorted(named - {*devices.KINDS, "*"})  # the reference's "*" names no kind


def check_backends(policy: Policy, backends: Sequence[Found], device: str) -> None:
    """Every backend that the policy names must be installed, and of each list one must be usable on the device."""
    for name in (*policy.named(), *policy.deny):
        if not _meant(name, backends):
            raise ConfigurationError(f"no backend {str(name)!r} is installed.{_installing(name, backends)}")
    for order in (policy.order, *policy.overrides.values()):
        found = [backend for name in order for backend in _meant(name, backends)]
        rejected = [backend.verdict for backend in found if backend.verdict and not backend.is_usable]
        if order and len(rejected) == len(found):
            asked = ",".join(map(str, order))
            reasons = "; ".join(f"{v.distribution}: {v.reason} ({v.stage})" for v in rejected)
            more = " `m3hal doctor` shows the traceback." if any(backend.traceback for backend in found) else ""
            raise UnsupportedError(f"backend {asked!r} is not usable on {device}: {reasons}.{more}", rejected)


def _meant(name: BackendName, backends: Sequence[Found]) -> list[Found]:
    return [backend for backend in backends if name.matches(backend.name, backend.distribution)]


def _installing(name: BackendName, backends: Sequence[Found]) -> str:
    if name.name in _EXTRAS and not name.distribution:
        return f" pip install 'm3hal[{name.name}]' installs it, or in a clone pip install -e backends/{name.name}."
    spelled = [str(found) if name.distribution else found.name for found in backends]
    return did_you_mean(str(name), [*spelled, *RESERVED])
