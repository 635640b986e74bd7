"""A plan as a table, an explanation and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from m3hal import __version__
from m3hal.dispatch.libraries import software
from m3hal.dispatch.table import folded, table

if TYPE_CHECKING:
    from m3hal.dispatch.discovery import Found
    from m3hal.dispatch.plans import Choice, Plan


def plan_table(plan: Plan, width: int | None = None) -> str:
    """One row per operator and server; sites that share it are joined."""
    return heading(plan) if plan.in_tree else f"{heading(plan)}\n{rows_table(plan, width)}"


def rows_table(plan: Plan, width: int | None = None) -> str:
    """The choices alone."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for choice in plan.choices:
        key = (choice.operator, served_by(plan, choice), plan.impl_id(choice), choice.reason)
        merged.setdefault(key, []).append(choice.site or "all")
    rows = [(op, ", ".join(sites), server, identity, why) for (op, server, identity, why), sites in merged.items()]
    return table(("operator", "sites", "served by", "impl_id", "why"), rows, width)


def heading(plan: Plan) -> str:
    """What the plan is about, in a line or two."""
    assumed = "" if plan.present else " (not in this machine: libraries assumed, nothing probed)"
    lines = [f"m3hal plan {plan.fingerprint} for {plan.device}{assumed}, backend {plan.policy.told('backend')}"]
    if plan.in_tree:
        return "\n".join([*lines, f"vLLM's in-tree model stays: {plan.reason}"])
    lines += [
        f"cache layout at {site}: {layout} ({plan.layout_reasons[site]})" for site, layout in plan.layouts.items()
    ]
    return "\n".join([*lines, *_idle(plan)])


def _idle(plan: Plan) -> list[str]:
    """A warning for each backend that the policy names and that the device, a library or its probe keeps out whole."""
    rejected = [found for found in plan.backends if found.verdict and not found.is_usable]
    return [
        f"warning: {name}, which the policy names, serves nothing here: {found.verdict.reason} ({found.verdict.stage})"
        for name in plan.policy.named()
        for found in rejected
        if found.verdict and found.verdict.stage != "policy" and name.matches(found.name, found.distribution)
    ]


def explain(plan: Plan, operator: str | None, width: int | None) -> str:
    """The configuration and where it came from, the backends, then the verdicts on an operator, or the table."""
    parts = [
        "configuration\n" + "\n".join(f"  {key} = {origin}" for key, origin in plan.policy.origins.items()),
        "backends\n" + "\n".join(f"  {_backend(found)}" for found in plan.backends),
    ]
    if plan.faults:
        parts.append("faults in manifests\n" + "\n".join(f"  {v.operator}: {v}" for v in plan.faults))
    told = [folded(part, width) for part in parts]
    if operator is None:
        return "\n\n".join([folded(heading(plan), width), rows_table(plan, width), *told])
    return "\n\n".join([*(folded(part, width) for part in (heading(plan), *_explain_rows(plan, operator))), *told])


def _backend(found: Found) -> str:
    verdict = found.verdict
    assert verdict is not None, found  # discovery and screening judge every backend
    origin = f"{found.distribution} {found.version}".strip()
    return f"{found.name} ({origin}): " + (
        f"usable: {verdict.reason}" if verdict.accepted else f"rejected at {verdict.stage}: {verdict.reason}"
    )


def _explain_rows(plan: Plan, operator: str) -> list[str]:
    """A paragraph per outcome; sites that share it are joined."""
    sites: dict[str, list[str]] = {}
    for choice in plan.rows(operator):
        sites.setdefault(_outcome(plan, choice), []).append(choice.site)
    places = {outcome: f" at {', '.join(at)}" if any(at) else "" for outcome, at in sites.items()}
    return [f"{operator}{place}: {outcome}" for outcome, place in places.items()]


def _outcome(plan: Plan, choice: Choice) -> str:
    lines = [f"{served_by(plan, choice)} ({choice.reason})"]
    lines += [f"  {part.operator}: {served_by(plan, part)}" for part in plan.constituents(choice)]
    if choice.chosen:
        for rung in choice.chosen.impl.rungs:
            upper = "" if rung.max_tokens is None else rung.max_tokens
            lines.append(f"  rung {rung.name}: {', '.join(rung.phases)}, {rung.min_tokens}..{upper} tokens")
    return "\n".join([*lines, *(f"  {verdict}" for verdict in choice.verdicts)])


def served_by(plan: Plan, choice: Choice) -> str:
    """The server, with the implementation's name where that says more, and the backends of a composition."""
    if choice.composed:
        return f"composed ({', '.join(dict.fromkeys(_backends(plan, choice)))})"
    if choice.chosen and choice.chosen.label != choice.operator:
        return f"{choice.server} {choice.chosen.label}"
    return choice.server


def _backends(plan: Plan, choice: Choice) -> list[str]:
    if choice.chosen:
        return [choice.chosen.backend]
    return [backend for part in plan.constituents(choice) for backend in _backends(plan, part)]


def plan_json(plan: Plan) -> dict[str, Any]:
    """Plain data, in a fixed order."""
    return {
        "fingerprint": plan.fingerprint,
        "device": plan.device,
        "present": plan.present,
        "versions": {"m3hal": __version__, **software()},
        "sites": {site.kind: asdict(site) for site in plan.sites.values()},
        "policy": plan.policy.to_json(),
        "origins": {key: str(origin) for key, origin in plan.policy.origins.items()},
        "in_tree": plan.in_tree,
        "reason": plan.reason,
        "layouts": {site: {"layout": name, "why": plan.layout_reasons[site]} for site, name in plan.layouts.items()},
        "backends": [
            {
                "name": found.name,
                "distribution": found.distribution,
                "version": found.version,
                "verdict": found.verdict.to_json() if found.verdict else None,
            }
            for found in plan.backends
        ],
        "faults": [verdict.to_json() for verdict in plan.faults],
        "choices": [_choice_json(plan, choice) for choice in plan.choices],
    }


def _choice_json(plan: Plan, choice: Choice) -> dict[str, Any]:
    row: dict[str, Any] = {"operator": choice.operator, "site": choice.site, "server": choice.server}
    if choice.chosen:
        chosen = choice.chosen
        row |= {
            "backend": chosen.backend,
            "distribution": chosen.distribution,
            "version": chosen.version,
            "impl": chosen.label,
            "impl_id": chosen.impl_id,
            "level": chosen.level,
            "traits": dict(chosen.impl.traits),
            "rungs": [rung.name for rung in chosen.impl.rungs],
        }
    if choice.composed:
        row |= {"composed": list(choice.composed), "impl_id": plan.impl_id(choice)}
    return row | {"reason": choice.reason, "verdicts": [verdict.to_json() for verdict in choice.verdicts]}
