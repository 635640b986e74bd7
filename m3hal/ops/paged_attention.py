"""Dense grouped-query attention over a paged cache.

For query token t at position p, with all keys ``s < seq_len`` of its request::

    keys(t)   = { s :  s <= p if causal,  s >= p - window_left if window_left >= 0 }
    out[t, h] = softmax_{s in keys}(scale * q[t, h] . k[s, g]) v[s, g]         g = h // (Hq // Hkv)

The dense layers of MiniMax-M3 are causal without a window; its drafter attends to a block non-causally in a window.

What a row does not see does not matter to it. Bytes past ``seq_len`` and pages of other requests may hold anything, NaN
too. A key of the request itself that lies in the row's future, or outside its window, may hold any finite number; where
it is NaN or infinite, this row may become NaN as well: queries that share a tile of keys can't hide ``0 * NaN``. The
reference hides it.
Source: transformers ``MiniMaxM3VLAttention``.
"""

from __future__ import annotations

from collections.abc import Mapping

from m3hal._lazy import torch
from m3hal.layouts import PagedCache
from m3hal.ops._batch import SeqMeta
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._softmax import masked_attention
from m3hal.ops._traits import BATCH_INVARIANT, EXACT, KV_DEQUANT_ROUND, MMA_ACCUM, P_DTYPE, Q_DTYPE, as_queries
from m3hal.ops.kv_read import read_sequence


def paged_attention(
    q: torch.Tensor,
    kv: PagedCache,
    meta: SeqMeta,
    *,
    scale: float,
    causal: bool,
    window_left: int,
    return_lse: bool,
    traits: Mapping[str, str] = EXACT,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of T query tokens over a paged cache.

    Args:
        q: [T, Hq, D] queries, after norm and RoPE.
        kv: cache of Hkv heads of dimension D; query head h reads kv head ``h // (Hq // Hkv)``.
        meta: which tokens belong to which request, their lengths and pages.
        scale: multiplies q.k; 128 ** -0.5 in MiniMax-M3.
        causal: hide the keys after the query.
        window_left: keys before the query that stay visible; -1: all.
        return_lse: also return the log-sum-exp.

    Returns:
        out [T, Hq, D] in q's dtype, and with ``return_lse`` the natural-log lse, fp32 [T, Hq]. An empty key set, and
        every row of a padded request, gives zeros and -inf.
    """
    tokens, q_heads, dim = q.shape
    groups = kv.layout.heads
    compute = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.full((tokens, q_heads), float("-inf"), dtype=compute, device=q.device)

    for request, seq_len in enumerate(meta.seq_lens.tolist()):
        first, last = meta.cu_q[request : request + 2].tolist()
        if first == last or seq_len == 0:
            continue
        k, v = read_sequence(kv, meta.block_table[request], seq_len, traits)  # [Hkv, S, D]

        query_position = torch.arange(seq_len - (last - first), seq_len, device=q.device)[:, None]
        key_position = torch.arange(seq_len, device=q.device)
        visible = torch.ones(last - first, seq_len, dtype=torch.bool, device=q.device)
        if causal:
            visible &= key_position <= query_position
        if window_left >= 0:
            visible &= key_position >= query_position - window_left

        grouped = as_queries(q[first:last], compute, traits).view(last - first, groups, q_heads // groups, dim)
        rows, row_lse = masked_attention(grouped, k.to(compute), v.to(compute), visible[:, None], scale, traits)
        out[first:last] = rows.flatten(1, 2).to(q.dtype)
        lse[first:last] = row_lse.flatten(1, 2)

    return (out, lse) if return_lse else out


def fake(
    q: torch.Tensor, kv: PagedCache, meta: SeqMeta, *, return_lse: bool, **_: object
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Empty outputs: contiguous [T, Hq, D] in q's dtype, and fp32 [T, Hq]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return (out, torch.empty(q.shape[:2], dtype=lse_dtype, device=q.device)) if return_lse else out


OPERATOR = Operator(
    name="paged_attention",
    kind="core",
    reference=paged_attention,
    fake=fake,
    numeric=Numeric("R", "worst row of the softmax-weighted sum; lse within the same bound"),
    sites=("dense_attention", "drafter"),
    group="cache",
    traits=(P_DTYPE, Q_DTYPE, KV_DEQUANT_ROUND, MMA_ACCUM, BATCH_INVARIANT),
    source="transformers minimax_m3_vl",
)
