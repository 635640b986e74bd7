"""Chooses each query's key blocks from their scores.

Of the visible blocks ``0 <= b < visible_blocks[t]``, the first ``init_blocks`` and the last ``local_blocks`` are chosen
whatever their score; the best of the others fill up to ``top_k_blocks``. With no more visible blocks than that, all are
chosen, and sparse attention is dense attention.

Source: transformers ``MiniMaxM3VLIndexer``; MiniMax-AI/MSA ``sparse_topk_select`` (ascending ids, -1 tail).
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._traits import TOPK_KEY_BITS


def topk_blocks(
    scores: torch.Tensor, visible_blocks: torch.Tensor, *, top_k_blocks: int, init_blocks: int, local_blocks: int
) -> torch.Tensor:
    """Block ids of every query token and index head.

    Args:
        scores: fp32 [T, Hi, blocks], from ``block_scores``.
        visible_blocks: int32 [T], ``position // block_size + 1``; 0 in a padded request.
        top_k_blocks: ids per row; init_blocks, local_blocks: of which are forced, at most top_k_blocks together.

    Returns:
        int32 [T, Hi, top_k_blocks], ascending, -1 in the tail. Among equal scores the lower id wins; NaN loses to all.

    Raises:
        ValueError: a row sees more blocks than have scores.
    """
    blocks = scores.shape[-1]
    if len(visible_blocks) and int(visible_blocks.max()) > blocks:
        raise ValueError(f"a row sees {int(visible_blocks.max())} blocks, but only {blocks} have scores; raise max_k")
    ids = torch.arange(blocks, device=scores.device).expand(scores.shape)
    return choose_blocks(scores, ids, visible_blocks, top_k_blocks, init_blocks, local_blocks)


def choose_blocks(
    scores: torch.Tensor,
    ids: torch.Tensor,
    visible_blocks: torch.Tensor,
    top_k_blocks: int,
    init_blocks: int,
    local_blocks: int,
) -> torch.Tensor:
    """The selection among candidates: scores and ids [T, Hi, n], ids ascending and each at most once."""
    if init_blocks + local_blocks > top_k_blocks:
        raise ValueError(
            f"init_blocks ({init_blocks}) and local_blocks ({local_blocks}) must fit into top_k_blocks ({top_k_blocks})"
        )
    end = visible_blocks.long()[:, None, None]
    visible = (ids >= 0) & (ids < end)
    forced = visible & ((ids < init_blocks) | (ids >= end - local_blocks))

    # stable sorts, the least significant key first: id (given), score, then forced before free before invisible
    order = torch.sort(-scores, dim=-1, stable=True).indices  # NaN sorts last
    rank = torch.where(forced, 0, torch.where(visible, 1, 2)).gather(-1, order)
    order = order.gather(-1, torch.sort(rank, dim=-1, stable=True).indices)[..., :top_k_blocks]

    absent = torch.iinfo(torch.int32).max
    chosen = torch.where(visible, ids, absent).gather(-1, order)
    chosen = torch.nn.functional.pad(chosen, (0, top_k_blocks - chosen.shape[-1]), value=absent).sort(dim=-1).values
    return chosen.masked_fill(chosen == absent, -1).to(torch.int32)


def fake(scores: torch.Tensor, visible_blocks: torch.Tensor, *, top_k_blocks: int, **_: object) -> torch.Tensor:
    """Empty int32 [T, Hi, k]."""
    return torch.empty((*scores.shape[:2], top_k_blocks), dtype=torch.int32, device=scores.device)


OPERATOR = Operator(
    name="topk_blocks",
    kind="core",
    reference=topk_blocks,
    fake=fake,
    numeric=Numeric("X", "given the scores; by score regret when topk_key_bits is declared"),
    sites=("sparse_attention",),
    traits=(TOPK_KEY_BITS,),
    source="transformers minimax_m3_vl; MiniMax-AI/MSA",
)
