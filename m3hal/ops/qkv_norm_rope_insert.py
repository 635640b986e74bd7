"""From a layer's hidden states to its queries and its caches: the fused projection, then ``qk_norm_rope_insert``.

    row = linear(x, weight);   q, index_q = qk_norm_rope_insert(row, ...)

A fused kernel hands the fp32 accumulators of the product to the norms and to the caches, so the definition rounds no
row in between; a composition does, because a projection returns the dtype of its input: trait ``qkv_round``.
Source: vLLM ``MinimaxM3QKVParallelLinearWithIndexer`` with ``fused_minimax_m3_qknorm_rope_kv_insert`` behind it; the
form without a rounding is that of fused QKV kernels with an insertion epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from m3hal._lazy import torch
from m3hal.formats import QTensor
from m3hal.layouts import PagedCache
from m3hal.ops import qk_norm_rope_insert as after
from m3hal.ops._batch import QKNorms
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._stored import ACTIVATION_FORMAT
from m3hal.ops._traits import BATCH_INVARIANT, EXACT, MMA_ACCUM
from m3hal.ops.kv_write import kv_write
from m3hal.ops.linear import linear
from m3hal.ops.rms_norm import rms_norm
from m3hal.ops.rope_partial import rope_partial


def qkv_norm_rope_insert(
    x: torch.Tensor,
    weight: torch.Tensor | QTensor,
    norms: QKNorms,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: PagedCache,
    index_cache: PagedCache | None,
    slots: torch.Tensor,
    index_slots: torch.Tensor | None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    num_index_heads: int,
    head_dim: int,
    index_dim: int,
    rotary_dim: int,
    eps: float,
    weight_offset: float,
    traits: Mapping[str, str] = EXACT,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Projection, norm, RoPE and cache insertion of T tokens.

    Args:
        x: [T, H], after the layer's input norm.
        weight: [row, H] in any storage format; its rows are those of ``[q | k | v | index_q | index_k]``, without the
            index part when num_index_heads is 0.
        norms, positions, cos_sin, kv, index_cache, slots, index_slots: as in ``qk_norm_rope_insert``.

    Returns:
        q [T, num_q_heads, head_dim] and index_q [T, num_index_heads, index_dim] (None on dense layers), in x's dtype.
    """
    row = linear(x.to(torch.promote_types(x.dtype, torch.float32)), weight, traits=traits)
    if traits.get("qkv_round") == "bfloat16":  # as a composition does: to the dtype of x
        row = row.to(x.dtype).to(row.dtype)

    def norm(heads: torch.Tensor, of_kind: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(heads, of_kind, eps=eps, weight_offset=weight_offset)
        return normed.to(x.dtype) if traits.get("norm_rope_round") == "bfloat16" else normed

    run = after.compose(
        rms_norm=norm,
        rope_partial=partial(rope_partial, rotary_dim=rotary_dim, traits=traits),
        kv_write=partial(kv_write, traits=traits),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        num_index_heads=num_index_heads,
        head_dim=head_dim,
        index_dim=index_dim,
    )
    q, index_q = run(row, norms, positions, cos_sin, kv, index_cache, slots, index_slots)
    return q.to(x.dtype), None if index_q is None else index_q.to(x.dtype)


def compose(
    *, linear: Callable[..., Any], qk_norm_rope_insert: Callable[..., Any], **_: object
) -> Callable[..., tuple[Any, Any]]:
    """The operator as a composition of a projection, which returns the dtype of x, and the fused insertion."""

    def run(x: torch.Tensor, weight: torch.Tensor | QTensor, *rest: Any) -> tuple[Any, Any]:
        found: tuple[Any, Any] = qk_norm_rope_insert(linear(x, weight), *rest)
        return found

    return run


def fake(x: torch.Tensor, *_: object, **statics: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Empty and contiguous [T, Hq, D], and [T, Hi, Di] or None."""
    return after.fake(x, **statics)


OPERATOR = Operator(
    name="qkv_norm_rope_insert",
    kind="fused",
    reference=qkv_norm_rope_insert,
    fake=fake,
    numeric=Numeric("R", "over each head of q, k, v and the index; stored codes by what they stand for"),
    sites=("dense_attention", "sparse_attention"),
    group="cache",
    mutates=("kv", "index_cache"),
    traits=(
        Trait("qkv_round", ("float32", "bfloat16"), True, "what the projection's rows are rounded to before the norms"),
        *after.OPERATOR.traits,
        ACTIVATION_FORMAT,
        MMA_ACCUM,
        BATCH_INVARIANT,
    ),
    covers=("linear", "qk_norm_rope_insert"),
    compose=compose,
    composed_traits={"qkv_round": "bfloat16"},
    source="vLLM minimax_m3; fused QKV kernels with an insertion epilogue",
)
