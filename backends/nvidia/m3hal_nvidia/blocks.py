"""``topk_blocks`` through FlashInfer's ``msa_topk_select`` as Blackwell's kernels do it: exact, ties to the lower id.

These kernels take one length and one forced window for all tokens, and the scores as [heads, blocks, tokens]. So each
call writes a copy in that order in which every token's own visible and forced blocks stand out by their score. Scores
are halved for that, which frees numbers above the greatest and below the least; two of them become equal only when
both are smaller than 2**-125 and differ by less than 2**-148.
"""

from __future__ import annotations

from functools import partial

import torch
from flashinfer.msa_ops import msa_topk_select

from m3hal.ops import load
from m3hal.shape import Site

_INF = float("inf")
#: what stands for forced, for infinity, for minus infinity and for NaN; a halved score is less than 1.71e38
_FORCED, _HIGH, _LOW, _NAN = 3.4e38, 2e38, -2e38, -3.4e38


def topk_blocks(site: Site) -> partial[torch.Tensor]:
    """The callable for a site."""
    return partial(_choose, site.top_k_blocks, site.init_blocks, site.local_blocks)


def _choose(
    k: int,
    init_blocks: int,
    local_blocks: int,
    scores: torch.Tensor,
    visible_blocks: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = load("topk_blocks").fake(scores, visible_blocks, top_k_blocks=k) if out is None else out
    if scores.numel():
        ranked = _ranked(scores, visible_blocks, init_blocks, local_blocks)
        msa_topk_select(ranked, k, output=out)
        out.masked_fill_(out >= visible_blocks[:, None, None], -1)  # ascending, so these are the tail already
    else:
        out.fill_(-1)
    return out


def _ranked(scores: torch.Tensor, visible_blocks: torch.Tensor, init_blocks: int, local_blocks: int) -> torch.Tensor:
    """fp32 [heads, blocks, tokens]: forced above all, then infinity down to NaN as numbers; -inf for what is hidden."""
    block = torch.arange(scores.shape[-1], device=scores.device)
    end = visible_blocks[:, None, None]
    ranked = scores.mul(0.5).add_(0.0)  # -0 becomes 0
    ranked.nan_to_num_(nan=_NAN, posinf=_HIGH, neginf=_LOW)
    ranked.masked_fill_((block < init_blocks) | (block >= end - local_blocks), _FORCED)
    ranked.masked_fill_(block >= end, -_INF)
    return ranked.permute(1, 2, 0).contiguous()
