"""What happens between an attention layer's projection and its attention.

Each token's row is ``[q | k | v | index_q | index_k]``. Every head of q, k, index_q and index_k is normalised with the
weight of its kind and rotated; v is not touched; k, v and index_k go to the caches::

    q, k, index_q, index_k = rope_partial(rms_norm(...));   kv_write(kv, k, v);   kv_write(index_cache, index_k)

The definition rounds once, at the end. A composition of operators that each return bf16 rounds after the norm too, and
so do transformers, Gaudi and unfused vLLM: trait ``norm_rope_round``.
Source: vLLM ``fused_minimax_m3_qknorm_rope_kv_insert``; transformers ``MiniMaxM3VLAttention``, ``MiniMaxM3VLIndexer``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from m3hal._lazy import torch
from m3hal.layouts import PagedCache
from m3hal.ops._batch import QKNorms
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._traits import DOUBLE_ROUNDING, EXACT, KV_SCALE_USED, MX_SCALE_RULE, NVFP4_QUANTIZER, ROPE_TABLE
from m3hal.ops.kv_write import kv_write
from m3hal.ops.rms_norm import rms_norm
from m3hal.ops.rope_partial import rope_partial


def qk_norm_rope_insert(
    qkv: torch.Tensor,
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
    """Norm, RoPE and cache insertion of T tokens.

    Args:
        qkv: [T, (num_q_heads + 2*num_kv_heads) * head_dim + (num_index_heads + 1) * index_dim]; without the index part
            when num_index_heads is 0, as on dense layers.
        norms: weights of the head norms.
        positions: int64 [T]. cos_sin: fp32 [max_pos, rotary_dim], as in ``rope_partial``.
        kv: main cache, written in place.
        index_cache: index keys, one head, written in place; None on dense layers.
        slots, index_slots: int64 [T], as in ``kv_write``. A negative slot writes nothing; the token's q is still made.
        eps, weight_offset: of the norms, as in ``rms_norm``.

    Returns:
        q [T, num_q_heads, head_dim] and index_q [T, num_index_heads, index_dim] (None on dense layers), in qkv's dtype.
    """
    run = compose(
        rms_norm=partial(rms_norm, eps=eps, weight_offset=weight_offset),
        rope_partial=partial(rope_partial, rotary_dim=rotary_dim, traits=traits),
        kv_write=partial(kv_write, traits=traits),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        num_index_heads=num_index_heads,
        head_dim=head_dim,
        index_dim=index_dim,
    )
    wide = torch.promote_types(qkv.dtype, torch.float32)
    row = qkv if traits.get("norm_rope_round") == "bfloat16" else qkv.to(wide)
    q, index_q = run(row, norms, positions, cos_sin, kv, index_cache, slots, index_slots)
    return q.to(qkv.dtype), None if index_q is None else index_q.to(qkv.dtype)


def compose(
    *,
    rms_norm: Callable[..., Any],
    rope_partial: Callable[..., Any],
    kv_write: Callable[..., Any],
    num_q_heads: int,
    num_kv_heads: int,
    num_index_heads: int,
    head_dim: int,
    index_dim: int,
    **_: object,
) -> Callable[..., Any]:
    """The operator as a composition of the given core operators, each of which returns the dtype of its input."""
    widths = [num_q_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    if num_index_heads:
        widths += [num_index_heads * index_dim, index_dim]

    def run(
        qkv: torch.Tensor,
        norms: QKNorms,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: PagedCache,
        index_cache: PagedCache | None,
        slots: torch.Tensor,
        index_slots: torch.Tensor | None,
    ) -> tuple[Any, Any]:
        def turned(part: torch.Tensor, weight: torch.Tensor | None, dim: int) -> Any:
            return rope_partial(rms_norm(heads(part, dim), weight), positions, cos_sin)

        q, k, v, *index = torch.split(qkv, widths, dim=-1)
        kv_write(kv, turned(k, norms.k, head_dim), heads(v, head_dim), slots)
        if not index:
            return turned(q, norms.q, head_dim), None
        index_q, index_k = index
        kv_write(index_cache, turned(index_k, norms.index_k, index_dim), None, index_slots)
        return turned(q, norms.q, head_dim), turned(index_q, norms.index_q, index_dim)

    def heads(part: torch.Tensor, dim: int) -> torch.Tensor:
        return part.view(len(part), part.shape[-1] // dim, dim)

    return run


def fake(
    qkv: torch.Tensor,
    *_: object,
    num_q_heads: int,
    num_index_heads: int,
    head_dim: int,
    index_dim: int,
    **__: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Empty and contiguous [T, Hq, D], and [T, Hi, Di] or None."""
    q = torch.empty((len(qkv), num_q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not num_index_heads:
        return q, None
    return q, torch.empty((len(qkv), num_index_heads, index_dim), dtype=qkv.dtype, device=qkv.device)


OPERATOR = Operator(
    name="qk_norm_rope_insert",
    kind="fused",
    reference=qk_norm_rope_insert,
    fake=fake,
    numeric=Numeric("U1", "of the larger of a rotated pair; v bit-exact; stored codes by what they stand for"),
    sites=("dense_attention", "sparse_attention"),
    group="cache",
    mutates=("kv", "index_cache"),
    traits=(
        Trait("norm_rope_round", ("float32", "bfloat16"), True, "what a normalised head is rounded to before RoPE"),
        ROPE_TABLE,
        KV_SCALE_USED,
        NVFP4_QUANTIZER,
        MX_SCALE_RULE,
        DOUBLE_ROUNDING,
    ),
    covers=("rms_norm", "rope_partial", "kv_write"),
    compose=compose,
    composed_traits={"norm_rope_round": "bfloat16"},
    source="vLLM fused_minimax_m3_qknorm_rope_kv_insert; transformers minimax_m3_vl",
)
