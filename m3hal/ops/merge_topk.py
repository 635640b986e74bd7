"""Merges the block choices of R shards of a context into the choice over the whole of it.

Each shard offers the best blocks that it owns; a block belongs to one shard. The rules are those of ``topk_blocks``,
and so is the result, provided that every shard offered its own ``top_k_blocks`` best.

Source: vLLM's context-parallel indexer (total order: score descending, id ascending).
"""

from __future__ import annotations

from m3hal._lazy import torch
from m3hal.ops._operator import Numeric, Operator
from m3hal.ops._traits import TOPK_KEY_BITS
from m3hal.ops.topk_blocks import choose_blocks


def merge_topk(
    scores: torch.Tensor,
    ids: torch.Tensor,
    visible_blocks: torch.Tensor,
    *,
    top_k_blocks: int,
    init_blocks: int,
    local_blocks: int,
) -> torch.Tensor:
    """Block ids of every query token and index head, over all shards.

    Args:
        scores: fp32 [R, T, Hi, k], the offered blocks' scores.
        ids: int32 [R, T, Hi, k], their ids in the whole context, in any order; -1: no offer, whatever its score holds.
        visible_blocks: int32 [T], of the whole context; 0 in a padded request.
        top_k_blocks, init_blocks, local_blocks: as in ``topk_blocks``. A forced block is chosen also when no shard
            offered it.

    Returns:
        int32 [T, Hi, top_k_blocks], ascending, -1 in the tail.
    """
    forced = _forced_ids(visible_blocks, init_blocks, local_blocks)[:, None].expand(-1, ids.shape[2], -1)
    ids = ids.permute(1, 2, 0, 3).flatten(2).long()  # [T, Hi, R*k]
    scores = scores.permute(1, 2, 0, 3).flatten(2)

    end = visible_blocks.long()[:, None, None]
    ids = ids.masked_fill((ids < init_blocks) | (ids >= end - local_blocks), -1)  # offered or not, they come by force
    ids = torch.cat([ids, forced], dim=-1)
    scores = torch.nn.functional.pad(scores, (0, forced.shape[-1]))

    ids, order = ids.sort(dim=-1)
    return choose_blocks(scores.gather(-1, order), ids, visible_blocks, top_k_blocks, init_blocks, local_blocks)


def _forced_ids(visible_blocks: torch.Tensor, init_blocks: int, local_blocks: int) -> torch.Tensor:
    """int64 [T, init + local]: the forced blocks of each row, each once, -1 where a row has fewer."""
    end = visible_blocks.long()[:, None]
    first = torch.arange(init_blocks, device=end.device).expand(len(end), -1)
    last = end - 1 - torch.arange(local_blocks, device=end.device)
    return torch.cat([first.masked_fill(first >= end, -1), last.masked_fill(last < init_blocks, -1)], dim=-1)


def fake(
    scores: torch.Tensor, ids: torch.Tensor, visible_blocks: torch.Tensor, *, top_k_blocks: int, **_: object
) -> torch.Tensor:
    """Empty int32 [T, Hi, k]."""
    return torch.empty((*ids.shape[1:3], top_k_blocks), dtype=torch.int32, device=ids.device)


OPERATOR = Operator(
    name="merge_topk",
    kind="core",
    reference=merge_topk,
    fake=fake,
    numeric=Numeric("X", "given the scores; by score regret when topk_key_bits is declared"),
    sites=("sparse_attention",),
    traits=(TOPK_KEY_BITS,),
    source="vLLM context-parallel indexer",
)
