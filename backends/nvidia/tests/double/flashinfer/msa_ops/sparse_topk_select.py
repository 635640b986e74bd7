"""The selection of compute capability 10.x: exact in IEEE order, ties to the lower id, one length for all tokens."""

from typing import Optional, Union

import torch

#: whether a tile of -inf is never selected; the documentation leaves it open
SKIPS_MINUS_INF = False


def msa_topk_select(
    max_score: torch.Tensor,
    topk: int,
    num_valid_pages: Optional[Union[int, torch.Tensor]] = None,
    output: Optional[torch.Tensor] = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
) -> torch.Tensor:
    if isinstance(num_valid_pages, torch.Tensor):
        raise NotImplementedError("per-token tensor num_valid_pages is only supported on SM120/SM121")
    assert max_score.dtype == torch.float32 and max_score.ndim == 3 and max_score.is_contiguous() and topk == 16
    heads, tiles, tokens = max_score.shape
    assert min(heads, tiles, tokens) > 0
    valid = tiles if num_valid_pages is None else num_valid_pages
    assert 0 < valid <= tiles and force_begin_blocks + force_end_blocks <= min(topk, valid)
    output = torch.empty(tokens, heads, topk, dtype=torch.int32) if output is None else output
    assert output.shape == (tokens, heads, topk) and output.dtype == torch.int32 and output.is_contiguous()

    scores = max_score.permute(2, 0, 1)[..., :valid].clone()
    assert not scores.isnan().any(), "the order of NaN is not documented"
    scores[..., :force_begin_blocks] = scores[..., valid - force_end_blocks :] = float("inf")
    ids = torch.sort(-scores, dim=-1, stable=True).indices[..., :topk]
    if SKIPS_MINUS_INF:
        ids = torch.where(scores.gather(-1, ids) == -float("inf"), valid, ids)
    ids = torch.nn.functional.pad(ids, (0, topk - ids.shape[-1]), value=valid).sort(-1).values
    return output.copy_(torch.where(ids == valid, -1, ids))
