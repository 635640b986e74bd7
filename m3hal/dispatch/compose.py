"""Composes a fused operator from bound core operators, their workspaces and their batch plans included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from m3hal import ops
from m3hal._lazy import torch
from m3hal.dispatch.manifest import Kernel
from m3hal.shape import Site

if TYPE_CHECKING:
    from m3hal.dispatch.bind import Bound


@dataclass(frozen=True)
class PlannedBatch(ops.SeqMeta):
    """A SeqMeta that carries the batch plan of each part of a composition, by the part's name."""

    plans: Mapping[str, Any]


def compose(operator: ops.Operator, site: Site, parts: Mapping[str, Bound]) -> Kernel:
    """The composition as a kernel.

    Its parts run one after the other, so they share one workspace, as large as the largest of theirs. ``plan_batch``
    plans each part that plans; the parts that don't get the SeqMeta.
    """
    from m3hal.reference import with_out

    assert operator.compose is not None, operator.name
    desk = _Desk()
    callables = {name: _adapted(name, part, desk) for name, part in parts.items()}
    function = with_out(operator.compose(**callables, **operator.static_values(site)))
    workspace_bytes = max(part.workspace_bytes for part in parts.values())

    def with_workspace(*inputs: Any, out: Any = None, workspace: Any = None) -> Any:
        desk.workspace = workspace
        return function(*inputs, out=out)

    planning = {name: part for name, part in parts.items() if part.plan_batch}
    return Kernel(
        with_workspace if workspace_bytes else function,
        workspace_bytes=workspace_bytes,
        plan_batch=_planner(planning) if planning else None,
        plan_bytes=sum(_aligned(part.plan_bytes) for part in planning.values()),
        **_packing(operator, parts),
    )


def _packing(operator: ops.Operator, parts: Mapping[str, Bound]) -> dict[str, Any]:
    """Weights are packed as the part packs them that does; of an operator's parts one does at most."""
    for part in parts.values():
        if part.prepare_weights and operator.prepare:
            return {"prepare_weights": operator.prepare(part.prepare_weights)}
        if part.prepare_weights:
            return {name: getattr(part, name) for name in ("prepare_weights", "update_weights", "unpack")}
    return {}


class _Desk(threading.local):
    """Where the running composition leaves its workspace for its parts; its own for each thread, as ranks may be."""

    workspace: Any = None


def _adapted(name: str, part: Bound, desk: _Desk) -> Callable[..., Any]:
    """The part's own callable, or, when it wants a workspace or a plan, one that fetches them."""
    run, wants_workspace = part.run, part.workspace_bytes > 0
    if not wants_workspace and part.plan_batch is None:
        return run

    def adapted(*inputs: Any) -> Any:
        given = tuple(_batch(name, part, x) if isinstance(x, ops.SeqMeta) else x for x in inputs)
        return run(*given, workspace=desk.workspace) if wants_workspace else run(*given)

    return adapted


def _batch(name: str, part: Bound, meta: ops.SeqMeta) -> Any:
    """What a part gets in place of the batch: its plan, made just now for one that the composition cut out itself."""
    if part.plan_batch is None or isinstance(meta, PlannedBatch):
        return meta.plans.get(name, meta) if isinstance(meta, PlannedBatch) else meta
    size, device = part.plan_bytes, meta.cu_q.device
    return part.plan_batch(meta, torch.empty(size, dtype=torch.uint8, device=device) if size else None)


def _planner(parts: Mapping[str, Bound]) -> Callable[[Any, Any], PlannedBatch]:
    def plan_batch(meta: ops.SeqMeta, storage: Any) -> PlannedBatch:
        plans, start = {}, 0
        for name, part in parts.items():
            assert part.plan_batch is not None
            mine = storage[start : start + part.plan_bytes] if part.plan_bytes else None
            plans[name] = part.plan_batch(meta, mine)
            start += _aligned(part.plan_bytes)
        return PlannedBatch(**{field.name: getattr(meta, field.name) for field in fields(ops.SeqMeta)}, plans=plans)

    return plan_batch


def _aligned(size: int) -> int:
    """Rounded up to 256 bytes, what device allocators align to, so that each part's storage may hold any type."""
    return -(-size // 256) * 256
