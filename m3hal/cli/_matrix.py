"""What each backend has for a device, whatever the policy would take of it: operators, levels, and why not more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from m3hal import ops
from m3hal.dispatch import Plan, devices
from m3hal.dispatch.discovery import REFERENCE, Found
from m3hal.dispatch.levels import proved, with_stale
from m3hal.dispatch.names import LEVEL_WORDS, LEVELS
from m3hal.dispatch.screen import Candidate, Demands, candidates, screen
from m3hal.dispatch.table import folded, table


@dataclass(frozen=True)
class Offer:
    """An implementation that would run at some sites, or the reason why it, or none, does.

    level: "" where nothing would run. stale: the command that says which files of an implementation changed after it
    ran.
    """

    backend: str
    operator: str
    sites: tuple[str, ...]
    impl: str
    level: str
    reason: str
    stale: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "sites": list(self.sites)}


def offers(plan: Plan) -> list[Offer]:
    """By backend and operator; of a backend's implementations at a site, the first that would run."""
    usable = [found for found in plan.backends if found.is_usable and found.name != REFERENCE]
    levels = proved(usable, plan.device)
    held = {choice.operator for choice in plan.choices if choice.engine}
    wanted = {name: ops.load(name) for name in ops.NAMES if held.isdisjoint((name, *ops.covered(name)))}
    demands = Demands(plan.policy.require, None, True, devices.kind(plan.device) != "cpu", plan.device)
    found_offers = []
    for found in usable:
        good = with_stale(found, candidates(found, wanted, levels)[0], plan.device)
        for operator in wanted.values():
            mine = [candidate for candidate in good if candidate.operator == operator.name]
            found_offers += _merged(_at_sites(plan, found, operator, mine, demands))
    return found_offers


def _at_sites(
    plan: Plan, found: Found, operator: ops.Operator, mine: list[Candidate], demands: Demands
) -> Iterator[Offer]:
    for site in plan.sites.values():
        if site.kind not in operator.sites:
            continue
        verdicts = [(candidate, screen(candidate, operator, site, demands)) for candidate in mine]
        first = next((pair for pair in verdicts if pair[1].accepted), None)
        if first:
            chosen = first[0]
            yield Offer(found.name, operator.name, (site.kind,), chosen.label, chosen.level, "", chosen.stale)
        elif verdicts:
            reason = "; ".join(dict.fromkeys(f"{c.label}: {v.reason}" for c, v in verdicts))
            yield Offer(found.name, operator.name, (site.kind,), "", "", reason)
        else:
            withheld = found.manifest.withheld if found.manifest else {}
            yield Offer(found.name, operator.name, (site.kind,), "", "", withheld.get(operator.name, ""))


def _merged(found: Iterator[Offer]) -> list[Offer]:
    """Sites with one outcome are one row."""
    sites: dict[Offer, list[str]] = {}
    for offer in found:
        sites.setdefault(replace(offer, sites=()), []).extend(offer.sites)
    return [replace(offer, sites=tuple(at)) for offer, at in sites.items()]


def withheld(plan: Plan, operator: str) -> str:
    """Why backends for this device do not offer an operator although their library has something like it."""
    reasons = [
        f"{found.name} withholds {operator}: {found.manifest.withheld[operator]}"
        for found in plan.backends
        if found.is_usable and found.manifest and operator in found.manifest.withheld
    ]
    return "\n".join(reasons)


def matrix(plan: Plan, found: list[Offer], width: int | None = None) -> str:
    """A table of what would run, then per backend why not more."""
    if not found:
        return ""
    running = [(o.backend, o.operator, ", ".join(o.sites), o.impl, _proved(o, plan.device)) for o in found if o.impl]
    lines = [f"what each backend has for {plan.device}"]
    if running:
        lines.append(table(("backend", "operator", "sites", "implementation", "proved"), running, width))
    for backend in dict.fromkeys(offer.backend for offer in found):
        mine = [offer for offer in found if offer.backend == backend and not offer.impl]
        reasons = [f"{backend} does not run {o.operator} at {', '.join(o.sites)}: {o.reason}" for o in mine if o.reason]
        lines += [folded(reason, width) for reason in reasons]
        absent = list(dict.fromkeys(offer.operator for offer in mine if not offer.reason))
        if absent:
            lines.append(folded(f"{backend} has nothing for {', '.join(absent)}", width))
    commands = dict.fromkeys(offer.stale for offer in found if offer.stale)
    lines += [f"stale: `{command}` says which files changed" for command in commands]
    return "\n".join(lines)


def _proved(offer: Offer, device: str) -> str:
    """How far, in words."""
    if offer.stale:
        return "stale: ran with other files"
    return "run on a CPU" if device == "cpu" and offer.level == LEVELS[-1] else LEVEL_WORDS[offer.level]
