"""A backend of the nine operators that vLLM's layers call: the reference, until one of them is told to lie.

It is registered with m3hal as the script starts, and bound like any vendor's; :data:`lie` says which operator lies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from m3hal import Impl, Kernel, Manifest, Site, ops
from m3hal.reference import bind_definition

#: the operator that lies now; "" for none. "dense": sparse_attention sees every block, as if there were no MSA.
lie = ""


def _louder(result: Any) -> Any:
    return result * 1.5


def _rotated_ids(result: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """The right weights for the wrong experts."""
    weights, ids = result
    return weights, ids.roll(1, dims=-1)


def _own_block_only(ids: torch.Tensor) -> Any:
    """Forgets every chosen block but the newest."""
    newest = ids.amax(-1, keepdim=True)
    return torch.cat([newest, torch.full_like(ids[..., 1:], -1)], dim=-1)


def _louder_first(result: tuple[Any, Any]) -> Any:
    first, second = result
    return _louder(first), second


LIES: dict[str, Callable[[Any], Any]] = {
    "rms_norm": _louder,
    "add_rms_norm": _louder_first,
    "qk_norm_rope_insert": _louder_first,
    "select_blocks": _own_block_only,
    "sparse_attention": _louder,
    "paged_attention": _louder,
    "route_topk": _rotated_ids,
    "swiglu_oai": _louder,
    "moe_experts": _louder,
}


@dataclass
class Planned:
    """What plan_batch makes of a SeqMeta; ``run`` must get this instead."""

    meta: ops.SeqMeta


@dataclass
class Packed:
    """What prepare_weights makes of ExpertWeights; ``run`` must get this instead."""

    experts: ops.ExpertWeights


#: operator -> how often its batch was planned, how often it ran, and the addresses of the workspaces it ran with
calls: dict[str, dict[str, Any]] = {}


def _factory(name: str) -> Callable[[Site], Kernel]:
    """Readers of caches plan their batch and want a workspace; the experts are packed."""
    plans = name in ("select_blocks", "sparse_attention", "paged_attention")

    def factory(site: Site) -> Kernel:
        honest = bind_definition(ops.load(name), site)
        seen = calls.setdefault(name, {"planned": 0, "ran": 0, "workspaces": set()})

        def run(*inputs: Any, out: torch.Tensor | None = None, workspace: torch.Tensor | None = None) -> Any:
            seen["ran"] += 1
            if plans:
                assert workspace is not None
                assert workspace.numel() >= _SCRATCH[name]
                seen["workspaces"].add(workspace.data_ptr())
                *inputs, planned = inputs
                inputs = (*inputs, planned.meta)
            if name == "moe_experts":
                *inputs, packed = inputs
                inputs = (*inputs, packed.experts)
            if lie == "dense" and name == "sparse_attention":
                inputs = _all_blocks(*inputs)
            result = honest(*inputs)
            if lie == name:
                result = LIES[name](result)
            return result if out is None else out.copy_(result)

        def plan_batch(meta: ops.SeqMeta, storage: torch.Tensor | None) -> Planned:
            assert storage is not None
            assert storage.numel() >= 64
            seen["planned"] += 1
            return Planned(meta)

        if plans:
            return Kernel(run, workspace_bytes=_SCRATCH[name], plan_batch=plan_batch, plan_bytes=64)
        return Kernel(run, prepare_weights=Packed if name == "moe_experts" else None)

    return factory


#: bytes of workspace; the two at the sparse site share one of the larger size
_SCRATCH = {"select_blocks": 1000, "sparse_attention": 3000, "paged_attention": 2000}


def _all_blocks(q: Any, kv: Any, block_ids: torch.Tensor, meta: Any) -> Any:
    blocks = torch.arange(-(-meta.max_k // kv.layout.page_size), dtype=torch.int32)
    return q, kv, blocks.expand(*block_ids.shape[:2], -1), meta


for _name in LIES:
    globals()[f"make_{_name}"] = _factory(_name)

MANIFEST = Manifest(
    name="sentinels",
    vendor="m3hal tests",
    api=">=1,<2",
    devices=("cpu",),
    operators={
        name: (Impl(f"{__name__}:make_{name}", layouts=("hnd",) if ops.load(name).group == "cache" else ()),)
        for name in LIES
    },
)
