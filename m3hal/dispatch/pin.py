"""Pinned plans: an exported plan that has to come out again, and the difference when it doesn't."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m3hal.dispatch import watch
from m3hal.dispatch.errors import ConfigurationError, M3halError
from m3hal.dispatch.plans import Plan
from m3hal.dispatch.policy import Policy


@dataclass(frozen=True)
class Pin:
    """An exported plan. policy: what it was planned with. impl_ids: (operator, site) -> implementation."""

    path: str
    data: Mapping[str, Any]
    policy: Policy
    impl_ids: Mapping[tuple[str, str], str]

    @property
    def is_in_tree(self) -> bool:
        """Whether the plan left vLLM's in-tree model in place."""
        return bool(self.data.get("in_tree"))


def load(policy: Policy) -> Pin:
    """The plan that a policy pins. It brings its own policy, so no other key that decides it may be set beside it."""
    assert policy.pinned is not None
    free = ("plan", "fingerprint", *watch.KEYS)
    beside = [k for k, origin in policy.origins.items() if k not in free and not origin.is_default]
    if beside:
        where = policy.origins[beside[0]].carrier
        raise ConfigurationError(f"'plan' pins every choice; remove {beside[0]!r} from {where}, or 'plan'.")
    try:
        data = json.loads(Path(policy.pinned).read_text(encoding="utf-8"))
        ids = {(row["operator"], row["site"]): row["impl_id"] for row in data["choices"] if "backend" in row}
        own = Policy.resolve(data["policy"], environ={}, carrier=f"the pinned plan {policy.pinned}")
        data["fingerprint"], data["device"], _rows(data), _layouts(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{policy.pinned} is no exported plan ({type(error).__name__}: {error}); "
            "`m3hal explain --json > plan.json` writes one."
        ) from error
    return Pin(policy.pinned, data, replace(own, watch=policy.watch), ids)


def check(plan: Plan, pin: Pin) -> None:
    """Raises M3halError with the difference when the plan is not the pinned one."""
    if plan.fingerprint == pin.data["fingerprint"]:
        return
    lines = difference(pin.data, plan.to_json())
    raise M3halError(
        f"the pinned plan {pin.path} can't be made here:\n  "
        + "\n  ".join(lines)
        + "\nInstall what it names, or export the plan again."
    )


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two exported plans, a line each."""
    lines = [
        f"{key}: was {old.get(key)!r}, is {new.get(key)!r}"
        for key in ("device", "policy")
        if old.get(key) != new.get(key)
    ]
    before, after = _rows(old), _rows(new)
    for operator, site in dict.fromkeys([*before, *after]):
        was, now = before.get((operator, site), "nothing"), after.get((operator, site), "nothing")
        if was != now:
            lines.append(f"{operator}{f' at {site}' if site else ''}: was {was}, is {now}")
    if old.get("layouts") != new.get("layouts"):
        lines.append(f"cache layouts: was {_layouts(old)}, is {_layouts(new)}")
    return lines or ["the fingerprints differ, the rows don't: another version of m3hal wrote it"]


def _rows(plan: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    def told(row: Mapping[str, Any]) -> str:
        return " ".join(filter(None, [row["server"], row.get("impl", ""), row.get("impl_id", "")]))

    return {(row["operator"], row["site"]): told(row) for row in plan.get("choices", ())}


def _layouts(plan: Mapping[str, Any]) -> dict[str, str]:
    return {site: entry["layout"] for site, entry in plan.get("layouts", {}).items()}
