"""Block-sparse grouped-query attention: each query attends to the key blocks that the indexer chose for it.

For query token t at position p and kv head g, the keys are the positions of the selected blocks ``block_ids[t, g]``
that are not in the future::

    keys(t, g) = { s : s // block_size in block_ids[t, g],  s <= p,  s < seq_len }
    out[t, h]  = softmax_{s in keys}(scale * q[t, h] . k[s, g]) v[s, g]        for the query heads h of group g

What a row does not see does not matter to it. Bytes past ``seq_len``, blocks that its ids do not name, and pages of
other requests may hold anything, NaN too. A key of a named block that lies in the row's future may hold any finite
number; where it is NaN or infinite, this row may become NaN as well: queries that share a tile of keys can't hide
``0 * NaN``. The reference hides it.

Source: MiniMax-AI/MSA; transformers ``minimax_m3_vl`` (``MiniMaxM3VLAttention`` with the block mask of its indexer).
Dense attention over more than ``top_k_blocks * block_size`` keys is a different function, not an implementation.
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


def sparse_attention(
    q: torch.Tensor,
    kv: PagedCache,
    block_ids: torch.Tensor,
    meta: SeqMeta,
    *,
    scale: float,
    block_size: int,
    return_lse: bool,
    traits: Mapping[str, str] = EXACT,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of T query tokens over their selected blocks of a paged cache.

    Args:
        q: [T, Hq, D] queries, after norm and RoPE.
        kv: cache of Hkv heads of dimension D; query head h reads kv head ``h // (Hq // Hkv)``.
        block_ids: int32 [T, Hkv, k], logical block numbers (position // block_size), ascending, -1 in the tail. Ids
            past the query's own block are ignored.
        meta: of each request b, its query tokens cu_q[b]:cu_q[b + 1] of the T, its length seq_lens[b] (those tokens
            included, as the last ones; 0 marks padding), and the pages of its keys, block_table[b].
        scale: multiplies q.k; 128 ** -0.5 in MiniMax-M3.
        block_size: positions per block.
        return_lse: also return the log-sum-exp.
        traits: roundings of an implementation to reproduce; EXACT is none.

    Returns:
        out [T, Hq, D] in q's dtype, and with ``return_lse`` the natural-log lse [T, Hq], fp32 (fp64 for an fp64 q). An
        empty key set, and every row of a padded request, gives zeros and -inf.
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

        query_position = torch.arange(seq_len - (last - first), seq_len, device=q.device)
        key_position = torch.arange(seq_len, device=q.device)
        selected = _is_selected(block_ids[first:last], key_position // block_size)  # [t, Hkv, S]
        causal = key_position <= query_position[:, None]
        visible = selected & causal[:, None]

        queries = as_queries(q[first:last], compute, traits)  # in the dtype of the computation, rounded as traits say
        grouped = queries.view(last - first, groups, q_heads // groups, dim)
        rows, row_lse = masked_attention(grouped, k.to(compute), v.to(compute), visible, scale, traits)
        out[first:last] = rows.flatten(1, 2).to(q.dtype)
        lse[first:last] = row_lse.flatten(1, 2)

    return (out, lse) if return_lse else out


def _is_selected(block_ids: torch.Tensor, key_block: torch.Tensor) -> torch.Tensor:
    """bool [t, Hkv, S]: whether each key's block is among the ids; -1 and ids past the sequence select nothing."""
    blocks = int(key_block[-1]) + 1
    chosen = block_ids.long()
    chosen = torch.where((chosen < 0) | (chosen >= blocks), blocks, chosen)
    table = torch.zeros(*block_ids.shape[:2], blocks + 1, dtype=torch.bool, device=block_ids.device)
    return table.scatter_(-1, chosen, True)[..., key_block]


def fake(
    q: torch.Tensor, kv: PagedCache, block_ids: torch.Tensor, meta: SeqMeta, *, return_lse: bool, **_: object
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Empty outputs: contiguous [T, Hq, D] in q's dtype, and fp32 [T, Hq]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return (out, torch.empty(q.shape[:2], dtype=lse_dtype, device=q.device)) if return_lse else out


OPERATOR = Operator(
    name="sparse_attention",
    kind="core",
    reference=sparse_attention,
    fake=fake,
    numeric=Numeric("R", "worst row of the softmax-weighted sum; lse within the same bound"),
    sites=("sparse_attention",),
    group="cache",
    traits=(P_DTYPE, Q_DTYPE, KV_DEQUANT_ROUND, MMA_ACCUM, BATCH_INVARIANT),
    source="MiniMax-AI/MSA; transformers minimax_m3_vl",
)
