"""The indexer's score of each key block: the best dot product of the index query with a visible key of the block.

    score[t, h, b] = max { index_q[t, h] . index_k[s] :  s // block_size = b,  s <= p,  s < seq_len }

for query token t at position p; no scale, -inf where no key is visible. All index heads share the one index key.
Source: transformers ``MiniMaxM3VLIndexer``; MiniMax-AI/MSA.
"""

from __future__ import annotations

from collections.abc import Mapping

from m3hal._lazy import torch
from m3hal.layouts import PagedCache
from m3hal.ops._batch import SeqMeta
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._traits import BATCH_INVARIANT, EXACT, KV_DEQUANT_ROUND, MMA_ACCUM, Q_DTYPE, as_queries
from m3hal.ops.kv_read import read_sequence


def block_scores(
    index_q: torch.Tensor,
    index_cache: PagedCache,
    meta: SeqMeta,
    *,
    block_size: int,
    traits: Mapping[str, str] = EXACT,
) -> torch.Tensor:
    """Scores of T query tokens against the key blocks of their requests.

    Args:
        index_q: [T, Hi, Di], after norm and RoPE.
        index_cache: index keys, one head of dimension Di.
        meta: which tokens belong to which request, their lengths and pages.
        block_size: positions per block.

    Returns:
        fp32 [T, Hi, ceil(meta.max_k / block_size)]. A hidden key counts for nothing, whatever its bytes hold; a visible
        NaN makes its block's score NaN.

    Raises:
        ValueError: a request is longer than ``meta.max_k``.
    """
    tokens, heads, _ = index_q.shape
    compute = torch.promote_types(index_q.dtype, torch.float32)
    blocks = -(-meta.max_k // block_size)
    scores = torch.full((tokens, heads, blocks), float("-inf"), dtype=compute, device=index_q.device)

    for request, seq_len in enumerate(meta.seq_lens.tolist()):
        first, last = meta.cu_q[request : request + 2].tolist()
        if first == last or seq_len == 0:
            continue
        if seq_len > meta.max_k:
            raise ValueError(f"request {request} has {seq_len} tokens but meta.max_k is {meta.max_k}; raise max_k")
        (keys,), _ = read_sequence(index_cache, meta.block_table[request], seq_len, traits)  # [S, Di]

        query_position = torch.arange(seq_len - (last - first), seq_len, device=index_q.device)
        future = torch.arange(seq_len, device=index_q.device) > query_position[:, None]
        dots = as_queries(index_q[first:last], compute, traits) @ keys.to(compute).T  # [t, Hi, S]
        dots = dots.masked_fill(future[:, None], float("-inf"))

        seen = -(-seq_len // block_size)
        dots = torch.nn.functional.pad(dots, (0, seen * block_size - seq_len), value=float("-inf"))
        scores[first:last, :, :seen] = dots.view(last - first, heads, seen, block_size).amax(-1)
    return scores


def fake(
    index_q: torch.Tensor, index_cache: PagedCache, meta: SeqMeta, *, block_size: int, **_: object
) -> torch.Tensor:
    """Empty fp32 [T, Hi, blocks]."""
    shape = (*index_q.shape[:2], -(-meta.max_k // block_size))
    dtype = torch.promote_types(index_q.dtype, torch.float32)
    return torch.empty(shape, dtype=dtype, device=index_q.device)


OPERATOR = Operator(
    name="block_scores",
    kind="core",
    reference=block_scores,
    fake=fake,
    numeric=Numeric("R", "over the finite scores of a row; -inf in the same places"),
    sites=("sparse_attention",),
    group="cache",
    traits=(Q_DTYPE, KV_DEQUANT_ROUND, MMA_ACCUM, BATCH_INVARIANT),
    source="transformers minimax_m3_vl; MiniMax-AI/MSA",
)
