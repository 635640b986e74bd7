"""Exported plans, and pinned ones: an exported plan that has to come out again, or the engine doesn't start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m3hal._files import parsed, write_whole
from m3hal.dispatch.carriers import BESIDE_A_PIN
from m3hal.dispatch.differences import differences, layouts, servers
from m3hal.dispatch.errors import ConfigurationError, M3halError
from m3hal.dispatch.plans import Plan
from m3hal.dispatch.policy import Policy

#: Differences that a refusal names.
_TOLD = 3
#: what an exported plan has, of what type
_KEYS: Mapping[str, type] = {
    "fingerprint": str,
    "device": str,
    "policy": dict,
    "sites": dict,
    "layouts": dict,
    "choices": list,
    "versions": dict,
}


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


def export(plan: Plan, path: str) -> None:
    """Writes a plan as the file that the key "plan" pins. Raises M3halError when it can't."""
    try:
        write_whole(path, json.dumps(plan.to_json(), indent=1) + "\n")
    except OSError as error:
        raise M3halError(f"the plan can't be written to {path} ({error}); name another file.") from error


def read(path: str) -> Mapping[str, Any]:
    """An exported plan. Raises ConfigurationError for what is none."""
    try:
        data = parsed(Path(path).read_text(encoding="utf-8"))
        problem = _shapeless(data)
        if problem:
            raise ValueError(problem)
        Policy.resolve(data["policy"], environ={}, carrier=f"the plan {path}")
        servers(data), layouts(data), differences(data, data), _impl_ids(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        told = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ConfigurationError(
            f"{path} is no exported plan ({told}); `m3hal plan export FILE` writes one."
        ) from error
    found: Mapping[str, Any] = data
    return found


def _shapeless(data: Any) -> str | None:
    """What an exported plan has and this lacks, as the end of a sentence; None when it has all."""
    if not isinstance(data, dict):
        return f"it holds a {type(data).__name__}, not an object"
    for key, kind in _KEYS.items():
        if key not in data:
            return f"it has no {key!r}"
        if not isinstance(data[key], kind):
            return f"its {key!r} is a {type(data[key]).__name__}, not a {kind.__name__}"
    rows = [*data["choices"], *data["sites"].values(), *data["layouts"].values()]
    if not all(isinstance(row, dict) for row in rows):
        return "a row of its tables is no object"
    named = all(isinstance(row.get(key), str) for row in data["choices"] for key in ("operator", "site"))
    return None if named else "a choice has no operator or no site"


def load(policy: Policy) -> Pin:
    """The plan that a policy pins. It brings its own policy, so no other key that decides it may be set beside it."""
    assert policy.pinned is not None
    beside = [k for k, origin in policy.origins.items() if k not in BESIDE_A_PIN and not origin.is_default]
    if beside:
        where = policy.origins[beside[0]].carrier
        raise ConfigurationError(f"'plan' pins every choice; remove {beside[0]!r} from {where}, or 'plan'.")
    data = read(policy.pinned)
    own = Policy.resolve(data["policy"], environ={}, carrier=f"the pinned plan {policy.pinned}")
    lacking = ["=".join(pair) for pair in policy.require if pair not in own.require]
    if lacking:  # no key asks for it, so the engine does, as vLLM in batch-invariant mode
        raise ConfigurationError(
            f"the engine requires {', '.join(lacking)}, and the pinned plan {policy.pinned} was made without; export "
            "one from an engine that requires it, or start this one without."
        )
    return Pin(policy.pinned, data, replace(own, watch=policy.watch, exported=policy.exported), _impl_ids(data))


def check(plan: Plan, pin: Pin) -> None:
    """Raises M3halError, one sentence with what differs, when the plan is not the pinned one."""
    if plan.fingerprint == pin.data["fingerprint"]:
        return
    found = [str(row) for row in differences(pin.data, plan.to_json()) if row.decides]
    told = "; ".join(found[:_TOLD]) or "the fingerprints differ and the rows don't: another version of m3hal wrote it"
    more = f"; and {len(found) - _TOLD} more, which `m3hal plan diff {pin.path}` lists" if len(found) > _TOLD else ""
    raise M3halError(
        f"the pinned plan {pin.path} can't be made here ({told}{more}): install what it names, or write a new one with "
        f"`m3hal plan export {pin.path}`."
    )


def _impl_ids(plan: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    return {(row["operator"], row["site"]): row["impl_id"] for row in plan["choices"] if "backend" in row}
