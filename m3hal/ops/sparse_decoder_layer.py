"""A whole decoder layer with sparse attention and experts, as one operator: what a vendor's monolithic kernel replaces.

    h, residual    = allreduce_add_rms_norm(x, residual, input_norm)
    q, index_q     = qkv_norm_rope_insert(h, qkv, ...)                       writes both caches
    attended       = sparse_attention(q, kv, select_blocks(index_q, index_cache))
    h, residual    = allreduce_add_rms_norm(linear(attended, o), residual, post_norm)
    weights, ids   = route_topk(h . gate^T, bias)
    out            = moe_experts(h, weights, ids, experts)                   the shared expert included

With a group of ranks the layer is tensor-parallel: x and out are this rank's shares of what the block before and this
one add to the residual stream, and whoever reads them sums them up first. Heads and inner dimensions are this rank's;
where a rank has only some of the experts, they are those from ``rank * num_local_experts`` on.

Nothing is rounded between the parts. Kernels round what their matrix units take to the dtype of x, and so do
compositions; a layer is compared as a product of such operands is, so that neither has to say so.
Source: transformers ``MiniMaxM3VLDecoderLayer``; vLLM ``minimax_m3`` (norms that reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from m3hal._lazy import torch
from m3hal.formats import QTensor
from m3hal.layouts import PagedCache
from m3hal.ops import allreduce_add_rms_norm as reducing_norm
from m3hal.ops import linear as projection
from m3hal.ops import moe_experts as experts_of_a_layer
from m3hal.ops import qkv_norm_rope_insert as projected
from m3hal.ops import route_topk as router
from m3hal.ops import select_blocks as indexer
from m3hal.ops import sparse_attention as attention
from m3hal.ops._batch import ExpertWeights, QKNorms, SeqMeta
from m3hal.ops._group import Group, ranks
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._traits import EXACT

#: freedoms of its parts that are no freedoms here: every layer may take them
BETWEEN = ("reduce_dtype", "add_norm_round", "qkv_round", "norm_rope_round")
_PARTS = (reducing_norm, projected, indexer, attention, projection, router, experts_of_a_layer)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer on this rank.

    input_norm, post_norm: [H]. qkv: [row, H], o: [H, Hq * D], in any storage format. norms: of the heads.
    gate: [E, H], bias: fp32 [E], of the router, over all experts. experts: this rank's, with its part of the shared
    one; or what ``prepare_weights`` returned.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor | QTensor
    norms: QKNorms
    o: torch.Tensor | QTensor
    post_norm: torch.Tensor
    gate: torch.Tensor
    bias: torch.Tensor
    experts: ExpertWeights


def sparse_decoder_layer(
    x: torch.Tensor,
    residual: torch.Tensor,
    layer: LayerWeights,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: PagedCache,
    index_cache: PagedCache,
    slots: torch.Tensor,
    index_slots: torch.Tensor,
    meta: SeqMeta,
    group: Group | None = None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    num_index_heads: int,
    head_dim: int,
    index_dim: int,
    rotary_dim: int,
    scale: float,
    eps: float,
    weight_offset: float,
    block_size: int,
    top_k_blocks: int,
    init_blocks: int,
    local_blocks: int,
    num_local_experts: int,
    top_k_experts: int,
    renormalize: bool,
    routed_scale: float,
    alpha: float,
    beta: float,
    limit: float,
    traits: Mapping[str, str] = EXACT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer over T tokens.

    Args:
        x: [T, H], this rank's share of the previous block's output; residual: [T, H], the same on every rank.
        layer: this rank's weights.
        positions, cos_sin, kv, index_cache, slots, index_slots: as in ``qk_norm_rope_insert``; both caches are written
            in place before they are read.
        meta: as in ``sparse_attention``; its lengths include these tokens.
        group: the tensor-parallel ranks; None: this one has the whole layer.

    Returns:
        out [T, H], this rank's share of the experts' output, in x's dtype; and the residual [T, H] that it is added to,
        in residual's dtype, on every rank the same.
    """
    norm: Mapping[str, Any] = {"eps": eps, "weight_offset": weight_offset}
    heads: Mapping[str, Any] = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "num_index_heads": num_index_heads,
    }
    widths: Mapping[str, Any] = {"head_dim": head_dim, "index_dim": index_dim, "rotary_dim": rotary_dim}
    blocks: Mapping[str, Any] = {"top_k_blocks": top_k_blocks, "init_blocks": init_blocks, "local_blocks": local_blocks}
    routing: Mapping[str, Any] = {"top_k_experts": top_k_experts, "renormalize": renormalize}
    run = compose(
        allreduce_add_rms_norm=partial(reducing_norm.allreduce_add_rms_norm, **norm, traits=traits),
        qkv_norm_rope_insert=partial(projected.qkv_norm_rope_insert, **heads, **widths, **norm, traits=traits),
        select_blocks=partial(indexer.select_blocks, block_size=block_size, **blocks, traits=traits),
        sparse_attention=partial(
            attention.sparse_attention, scale=scale, block_size=block_size, return_lse=False, traits=traits
        ),
        linear=partial(projection.linear, traits=traits),
        route_topk=partial(router.route_topk, **routing, routed_scale=routed_scale),
        moe_experts=partial(experts_of_a_layer.moe_experts, alpha=alpha, beta=beta, limit=limit, traits=traits),
        num_local_experts=num_local_experts,
    )
    wide = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    places = (positions, cos_sin, kv, index_cache, slots, index_slots)
    out, residual_out = run(x.to(wide), residual.to(wide), layer, *places, meta, group)
    return out.to(x.dtype), residual_out.to(residual.dtype)


def compose(
    *,
    allreduce_add_rms_norm: Callable[..., Any],
    qkv_norm_rope_insert: Callable[..., Any],
    select_blocks: Callable[..., Any],
    sparse_attention: Callable[..., Any],
    linear: Callable[..., Any],
    route_topk: Callable[..., Any],
    moe_experts: Callable[..., Any],
    num_local_experts: int,
    **_: object,
) -> Callable[..., tuple[Any, Any]]:
    """The operator as a composition; the router's product alone is torch's, in fp32 as engines keep it."""

    def run(
        x: torch.Tensor,
        residual: torch.Tensor,
        layer: LayerWeights,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: PagedCache,
        index_cache: PagedCache,
        slots: torch.Tensor,
        index_slots: torch.Tensor,
        meta: SeqMeta,
        group: Group | None = None,
    ) -> tuple[Any, Any]:
        h, residual = allreduce_add_rms_norm(x, residual, layer.input_norm, group)
        places = (positions, cos_sin, kv, index_cache, slots, index_slots)
        q, index_q = qkv_norm_rope_insert(h, layer.qkv, layer.norms, *places)
        attended = sparse_attention(q, kv, select_blocks(index_q, index_cache, meta), meta)
        h, residual = allreduce_add_rms_norm(linear(attended.flatten(1), layer.o), residual, layer.post_norm, group)
        wide = torch.promote_types(h.dtype, torch.float32)
        weights, ids = route_topk(h.to(wide) @ layer.gate.to(wide).T, layer.bias)
        first = ranks(group).rank * num_local_experts if num_local_experts < len(layer.gate) else 0
        here = (ids >= first) & (ids < first + num_local_experts)
        return moe_experts(h, weights, torch.where(here, ids - first, -1), layer.experts), residual

    return run


def prepare(pack: Callable[[ExpertWeights], Any]) -> Callable[[LayerWeights], LayerWeights]:
    """How a composition packs a layer's weights, from how its ``moe_experts`` does."""
    return lambda layer: replace(layer, experts=pack(layer.experts))


def fake(x: torch.Tensor, residual: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty and contiguous, one like ``x``, one like ``residual``."""
    empty = partial(torch.empty, device=x.device)
    return empty(x.shape, dtype=x.dtype), empty(residual.shape, dtype=residual.dtype)


def _traits() -> tuple[Trait, ...]:
    """Those of its parts, each once, but for what is rounded between them."""
    found = {trait.name: trait for part in _PARTS for trait in part.OPERATOR.traits}
    return tuple(trait for name, trait in found.items() if name not in BETWEEN)


OPERATOR = Operator(
    name="sparse_decoder_layer",
    kind="fused",
    reference=sparse_decoder_layer,
    fake=fake,
    numeric=Numeric("R", "where no selection is close; stored codes by what they stand for"),
    sites=("sparse_layer",),
    group="cache",
    optional=("shared_intermediate_size",),
    mutates=("kv", "index_cache"),
    traits=_traits(),
    covers=tuple(part.OPERATOR.name for part in _PARTS),
    compose=compose,
    prepare=prepare,
    source="transformers minimax_m3_vl; vLLM minimax_m3",
)
