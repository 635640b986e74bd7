"""Block-sparse grouped-query attention: each query attends to the key blocks that the indexer chose for it.

For query token t at position p and kv head g, the keys are the positions of the selected blocks ``block_ids[t, g]``
that are not in the future::

    keys(t, g) = { s : s // block_size in block_ids[t, g],  s <= p,  s < seq_len }
    out[t, h]  = softmax_{s in keys}(scale * q[t, h] . k[s, g]) v[s, g]        for the query heads h of group g

Source: MiniMax-AI/MSA; transformers ``minimax_m3_vl`` (``MiniMaxM3VLAttention`` with the block mask of its indexer).
Dense attention over more than ``top_k_blocks * block_size`` keys is a different function, not an implementation.
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.layouts import PagedCache
from m3hal.ops._batch import SeqMeta
from m3hal.ops._operator import Numeric, Operator, Trait
from m3hal.ops._softmax import masked_attention
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of T query tokens over their selected blocks of a paged cache.

    Args:
        q: [T, Hq, D] queries, after norm and RoPE.
        kv: cache of Hkv heads of dimension D; query head h reads kv head ``h // (Hq // Hkv)``.
        block_ids: int32 [T, Hkv, k], logical block numbers (position // block_size), ascending, -1 in the tail. Ids
            past the query's own block are ignored.
        meta: which tokens belong to which request, their lengths and pages.
        scale: multiplies q.k; 128 ** -0.5 in MiniMax-M3.
        block_size: positions per block.
        return_lse: also return the log-sum-exp.

    Returns:
        out [T, Hq, D] in q's dtype, and with ``return_lse`` the natural-log lse, fp32 [T, Hq]. An empty key set, and
        every row of a padded request, gives zeros and -inf.
    """
    tokens, q_heads, dim = q.shape
    groups = kv.layout.heads
    compute = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q), torch.full((tokens, q_heads), float("-inf"), dtype=compute, device=q.device)

    for request, seq_len in enumerate(meta.seq_lens.tolist()):
        first, last = meta.cu_q[request : request + 2].tolist()
        if first == last or seq_len == 0:
            continue
        k, v = read_sequence(kv, meta.block_table[request], seq_len)  # [Hkv, S, D]

        query_position = torch.arange(seq_len - (last - first), seq_len, device=q.device)
        key_position = torch.arange(seq_len, device=q.device)
        selected = _is_selected(block_ids[first:last], key_position // block_size)  # [t, Hkv, S]
        causal = key_position <= query_position[:, None]
        visible = selected & causal[:, None]

        grouped = q[first:last].to(compute).view(last - first, groups, q_heads // groups, dim)
        o, l = masked_attention(grouped, k.to(compute), v.to(compute), visible, scale)
        out[first:last] = o.reshape(-1, q_heads, dim).to(q.dtype)
        lse[first:last] = l.reshape(-1, q_heads)

    return (out, lse.to(torch.promote_types(torch.float32, lse.dtype))) if return_lse else out


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
    return (out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)) if return_lse else out


OPERATOR = Operator(
    name="sparse_attention",
    kind="core",
    reference=sparse_attention,
    fake=fake,
    numeric=Numeric("R", "worst row of the softmax-weighted sum; lse within the same bound"),
    sites=("sparse_attention",),
    group="cache",
    traits=(
        Trait("p_dtype", ("float32", "bfloat16", "e4m3x448"), False, "what the probabilities are rounded to before PV"),
        Trait("mma_accum", ("float32", "bfloat16"), False, "accumulator of the matrix products"),
        Trait("batch_invariant", ("no", "yes"), False, "a row's bits do not depend on the rest of the batch"),
    ),
    source="MiniMax-AI/MSA; transformers minimax_m3_vl",
)
