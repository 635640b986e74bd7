"""The plan's operators as the model's layers call them: bound once, each with its site's workspace."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from m3hal.vllm import opaque
from m3hal.vllm.stored import StoredLinear

if TYPE_CHECKING:
    from m3hal.dispatch import Bound, Plan
    from m3hal.shape import Site, SiteKind

#: Which operators the model calls, and where.
CALLED: dict[SiteKind, tuple[str, ...]] = {
    "dense_attention": ("rms_norm", "add_rms_norm", "qk_norm_rope_insert", "paged_attention"),
    "sparse_attention": ("rms_norm", "add_rms_norm", "qk_norm_rope_insert", "select_blocks", "sparse_attention"),
    "dense_mlp": ("rms_norm", "add_rms_norm", "swiglu_oai"),
    "moe": ("rms_norm", "add_rms_norm", "route_topk", "moe_experts", "swiglu_oai"),
}


class SiteOperators:
    """The operators of one site of the model. Its layers run one after the other, so they share one workspace."""

    def __init__(self, plan: Plan, kind: SiteKind) -> None:
        self.site: Site = plan.site(kind)
        self.layout = plan.layouts.get(kind, "")  # the page map of the site's caches, where their formats have it
        self._plan = plan
        own_linear = ("linear",) if not plan.choice("linear", kind).engine else ()
        self.bound: dict[str, Bound] = {name: plan.bind(name, kind) for name in (*CALLED[kind], *own_linear)}
        size = max(bound.workspace_bytes for bound in self.bound.values())
        self._workspace = torch.empty(size, dtype=torch.uint8)  # on the device that vLLM builds the model on
        self._run: dict[int, Callable[..., Any]] = {}

    def run(self, operator: str, layer: str) -> Callable[..., Any]:
        """The implementation's own callable; with the workspace attached if it asked for one.

        layer: the module that calls it, as vLLM names it; all layers share one callable unless calls are watched.
        """
        bound = self._plan.bind(operator, self.site.kind, layer)
        if id(bound) not in self._run:
            self._run[id(bound)] = self._callable(bound)
        return self._run[id(bound)]

    def serve(self, projection: torch.nn.Module, layer: str) -> None:
        """Gives a projection that m3hal holds the plan's ``linear``; vLLM's own compute themselves."""
        if isinstance(projection.quant_method, StoredLinear):
            projection.quant_method.run = self.run("linear", layer)

    def _callable(self, bound: Bound) -> Callable[..., Any]:
        run = bound.run if bound.unwatched is None else _while_serving(bound.run, bound.unwatched)
        run = partial(run, workspace=self._workspace) if bound.workspace_bytes else run
        return run if bound.traceable or bound.operator not in opaque.TRACED else opaque.call(bound, run)


def _while_serving(watched: Callable[..., Any], unwatched: Callable[..., Any]) -> Callable[..., Any]:
    """Watches no call of the forwards in which vLLM measures memory and warms up; they compute on nothing."""

    def run(*inputs: Any, **options: Any) -> Any:
        serving = is_forward_context_available() and isinstance(get_forward_context().attn_metadata, dict)
        return (watched if serving else unwatched)(*inputs, **options)

    return run


def operators_of(plan: Plan) -> dict[SiteKind, SiteOperators]:
    """One :class:`SiteOperators` for every site that the model has."""
    kinds = {site.kind for site in plan.shape.sites()}
    return {kind: SiteOperators(plan, kind) for kind in CALLED if kind in kinds}
