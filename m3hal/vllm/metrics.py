"""What ``/metrics`` says about the plan, beside vLLM's own metrics.

    m3hal_plan_info{version, fingerprint, device, model} 1
    m3hal_operator_info{operator, site, served_by, impl_id, level} 1

Both are written by the front-end process, which answers ``/metrics``, when it has planned. Levels are those of
:mod:`m3hal.dispatch.levels`; of a composition the lowest among its parts; of what the engine holds, none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import m3hal
from m3hal.dispatch import Plan
from m3hal.dispatch.names import LEVELS
from m3hal.dispatch.plans import Choice

_LABELS: Mapping[str, tuple[str, ...]] = {
    "m3hal_plan_info": ("version", "fingerprint", "device", "model"),
    "m3hal_operator_info": ("operator", "site", "served_by", "impl_id", "level"),
}


def publish(plan: Plan, model: str) -> None:
    """Replaces what the last plan of this process said."""
    plans, operators = (_gauge(name) for name in _LABELS)
    for gauge in (plans, operators):
        gauge.clear()
    plans.labels(m3hal.__version__, plan.fingerprint, plan.device, model).set(1)
    for choice in plan.choices:
        if choice.is_served:
            labels = (choice.operator, choice.site, choice.server, plan.impl_id(choice), level(plan, choice))
            operators.labels(*labels).set(1)


def level(plan: Plan, choice: Choice) -> str:
    """How far the implementation of a row has been proved; "" for what the engine holds."""
    if choice.engine:
        return ""
    if choice.chosen:
        return choice.chosen.level
    return min((level(plan, part) for part in plan.constituents(choice)), key=LEVELS.index)


@cache
def _gauge(name: str) -> Any:
    """A gauge of this process; where several processes answer, each of them has planned the same."""
    from prometheus_client import Gauge

    texts = {"m3hal_plan_info": "The plan that serves.", "m3hal_operator_info": "Which implementation serves what."}
    return Gauge(name, texts[name], _LABELS[name], multiprocess_mode="mostrecent")
