"""A legitimate evaluation of a whole layer: those of its parts, which hand each other numbers in the dtype of x.

What a part takes into its matrix units is rounded to that dtype by every kernel, a monolithic one too; see
:mod:`m3hal_conformance.legitimate`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from m3hal.layouts import PagedCache
from m3hal.ops import SeqMeta
from m3hal.ops._group import Group, ranks
from m3hal.ops.sparse_decoder_layer import BETWEEN, LayerWeights
from m3hal.ops.topk_blocks import topk_blocks
from m3hal.shape import Site
from m3hal_conformance.legitimate import (
    Traits,
    block_scores,
    linear,
    moe_experts,
    qkv_norm_rope_insert,
    route_topk,
    sparse_attention,
)
from m3hal_conformance.legitimate_ranks import allreduce_add_rms_norm


def sparse_decoder_layer(
    site: Site,
    traits: Traits,
    x: Tensor,
    residual: Tensor,
    layer: LayerWeights,
    positions: Tensor,
    cos_sin: Tensor,
    kv: PagedCache,
    index_cache: PagedCache,
    slots: Tensor,
    index_slots: Tensor,
    meta: SeqMeta,
    group: Group | None = None,
) -> tuple[Tensor, Tensor]:
    own: dict[str, Any] = {**(dict.fromkeys(BETWEEN, "bfloat16") if x.dtype == torch.bfloat16 else {}), **traits}
    h, residual = allreduce_add_rms_norm(site, own, x, residual, layer.input_norm, group)
    places = (positions, cos_sin, kv, index_cache, slots, index_slots)
    q, index_q = qkv_norm_rope_insert(site, own, h, layer.qkv, layer.norms, *places)
    visible = (meta.positions(len(x)) // site.block_size + 1).int()
    scores = block_scores(site, own, index_q, index_cache, meta)
    choice = {name: getattr(site, name) for name in ("top_k_blocks", "init_blocks", "local_blocks")}
    attended = sparse_attention(site, own, q, kv, topk_blocks(scores, visible, **choice), meta)
    projected = linear(site, own, attended.flatten(1), layer.o)
    h, residual = allreduce_add_rms_norm(site, own, projected, residual, layer.post_norm, group)
    weights, ids = route_topk(site, own, h.float() @ layer.gate.float().T, layer.bias)
    some = site.num_local_experts < len(layer.gate)
    ids = ids - ranks(group).rank * site.num_local_experts if some else ids
    here = (ids >= 0) & (ids < site.num_local_experts)
    return moe_experts(site, own, h, weights, torch.where(here, ids, -1), layer.experts), residual
