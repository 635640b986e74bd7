"""What a plan leaves unserved: an error for what was asked by name, the in-tree model under ``auto``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from m3hal import ops
from m3hal.dispatch import devices
from m3hal.dispatch.discovery import REFERENCE, Found
from m3hal.dispatch.errors import M3halError
from m3hal.dispatch.plans import Choice, Plan
from m3hal.dispatch.verdict import Verdict


def missing(plan: Plan) -> list[Choice]:
    """Unserved core operators, and unserved fused ones that the policy overrides."""
    unserved = [choice for choice in plan.choices if not choice.is_served]
    return [choice for choice in unserved if not _is_fused(choice) or choice.operator in plan.policy.overrides]


def _is_fused(choice: Choice) -> bool:
    return ops.load(choice.operator).kind == "fused"


def settle(plan: Plan) -> Plan:
    """The plan itself when nothing is missing; else the in-tree model, or M3halError with every reason."""
    gaps = missing(plan)
    if not gaps:
        return plan
    if plan.policy.order or plan.policy.overrides:
        raise _refused(plan, gaps)
    return replace(plan, in_tree=True, reason=_why_in_tree(plan, gaps))


def _refused(plan: Plan, gaps: Sequence[Choice]) -> M3halError:
    orders = [",".join(map(str, plan.policy.order_for(choice.operator))) for choice in gaps]
    asked = next((order for order in orders if order), "auto")
    rejections = [verdict for choice in gaps for verdict in verdicts(plan, choice)]
    lines = [
        f"backend {asked!r} leaves operators of this model without an implementation on {plan.device}, and what is "
        "asked for by name is not replaced:",
        *(f"  {line}" for line in _grouped(rejections)),
        *(f"  {choice.operator} at {choice.site}: {choice.reason}" for choice in gaps if _is_fused(choice)),
    ]
    if asked != "auto" and REFERENCE not in asked.split(","):
        lines.append(f"To let the reference serve these, ask for '{asked},{REFERENCE}'.")
    return M3halError("\n".join(lines), rejections)


def _grouped(rejections: Iterable[Verdict]) -> list[str]:
    """One line per reason, with every operator and site that it holds for."""
    groups: dict[str, dict[str, list[str]]] = {}
    for verdict in rejections:
        absent = verdict.reason == f"it doesn't implement {verdict.operator}"
        operators = groups.setdefault(f"{verdict.backend} doesn't implement" if absent else str(verdict), {})
        sites = operators.setdefault(verdict.operator, [])
        if verdict.site and not absent:
            sites.append(verdict.site)
    return [f"{reason} {_places(operators)}".rstrip() for reason, operators in groups.items()]


def _places(operators: Mapping[str, Sequence[str]]) -> str:
    """``rms_norm, topk_blocks``, or ``(rms_norm at moe, dense_mlp)`` where the sites are known."""
    places = [f"{name} at {', '.join(sites)}" if sites else name for name, sites in operators.items() if name]
    return f"({'; '.join(places)})" if any(operators.values()) else ", ".join(places)


def verdicts(plan: Plan, choice: Choice) -> list[Verdict]:
    """Why each backend that was asked doesn't serve an operator, in the policy's order."""
    order = plan.policy.order_for(choice.operator)
    asked = [
        found
        for name in order or (None,)
        for found in plan.backends
        if name is None or name.matches(found.name, found.distribution)
    ]
    return [verdict for found in asked for verdict in _about(plan, choice, found)]


def _about(plan: Plan, choice: Choice, found: Found) -> list[Verdict]:
    """One backend's rejections: itself, its implementations, its manifest's entries, or that it has none."""
    if found.verdict and not found.is_usable:
        return [found.verdict]
    faults = [verdict for verdict in plan.faults if verdict.operator == choice.operator]
    own = [v for v in (*choice.verdicts, *faults) if (v.backend, v.distribution) == (found.name, found.distribution)]
    rejected = [verdict for verdict in own if not verdict.accepted]
    if own:
        return rejected
    withheld = found.manifest.withheld.get(choice.operator) if found.manifest else None
    reason = f"it withholds {choice.operator}: {withheld}" if withheld else f"it doesn't implement {choice.operator}"
    return [Verdict("coverage", False, reason, found.name, found.distribution, choice.operator, choice.site)]


def _why_in_tree(plan: Plan, gaps: Sequence[Choice]) -> str:
    """One sentence on the backends that are for this device; the reference isn't offered to an accelerator."""
    apart = ("device", "policy")
    relevant = [f for f in plan.backends if f.name != REFERENCE and f.verdict and f.verdict.stage not in apart]
    if devices.kind(plan.device) == "cpu":
        relevant = [f for f in plan.backends if f.verdict and f.verdict.stage not in apart]
    if not relevant:
        return f"no installed backend is for {plan.device}; `m3hal backends` lists what is installed"
    return f"on {plan.device}, {'; '.join(_lack(plan, gaps, found) for found in relevant)}"


def _lack(plan: Plan, gaps: Sequence[Choice], found: Found) -> str:
    if found.verdict and not found.is_usable:
        return f"{found.name} is out: {found.verdict.reason}"
    own = [verdict for gap in gaps for verdict in _about(plan, gap, found)]
    absent = sorted({verdict.operator for verdict in own if verdict.stage == "coverage"})
    refused = next((verdict for verdict in own if verdict.stage != "coverage"), None)
    parts = [f"lacks {_few(absent)}"] if absent else []
    parts += [f"is refused {refused.operator} ({refused.reason})"] if refused else []
    return f"{found.name} {' and '.join(parts)}" if parts else f"{found.name} is complete"


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
