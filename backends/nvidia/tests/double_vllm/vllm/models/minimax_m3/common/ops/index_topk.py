"""Scores and choice as vLLM's kernels do them: a NaN key is overlooked, forced blocks are those of great scores."""

import torch

SPARSE_BLOCK_SIZE = 128


def minimax_m3_index_score(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
) -> torch.Tensor:
    total_q, heads, _ = idx_q.shape
    assert heads == num_kv_heads
    SCORE_TARGET_GRID = 48
    split_k = SCORE_TARGET_GRID
    if not (False):
        split_k = 1
    assert split_k in (1, 264, 2112)
    score = torch.full((heads, total_q, -(-max_seq_len // 2048) * 16), float("nan"))
    for request in range(len(seq_lens)):
        first, last = cu_seqlens_q[request : request + 2].tolist()
        for token in range(first, last):
            seen = int(prefix_lens[request]) + token - first + 1
            _score(score[:, token], idx_q[token], index_kv_cache, block_table[request], seen)
    return score


def minimax_m3_index_topk(
    score: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    heads, total_q, _ = score.shape
    ids = torch.empty(heads, total_q, topk, dtype=torch.int32) if out is None else out[:, :total_q]
    for request in range(len(prefix_lens)):
        first, last = cu_seqlens_q[request : request + 2].tolist()
        for token in range(first, last):
            visible = (int(prefix_lens[request]) + token - first + SPARSE_BLOCK_SIZE) // SPARSE_BLOCK_SIZE
            ids[:, token] = _choose(score[:, token, :visible], topk, init_blocks, local_blocks)
    return ids


def minimax_m3_index_decode(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: torch.Tensor | None = None,
    score_out: torch.Tensor | None = None,
) -> torch.Tensor:
    total_q, heads, _ = idx_q.shape
    assert heads == num_kv_heads and total_q == seq_lens.shape[0] * decode_query_len
    ids = torch.empty(heads, total_q, topk, dtype=torch.int32) if out is None else out[:, :total_q]
    for token in range(total_q):
        request, step = divmod(token, decode_query_len)
        seen = max(0, int(seq_lens[request]) - decode_query_len + step + 1)
        score = torch.empty(heads, -(-seen // SPARSE_BLOCK_SIZE))
        _score(score, idx_q[token], index_kv_cache, block_table[request], seen)
        ids[:, token] = _choose(score, topk, init_blocks, local_blocks)
    return ids


def _score(score: torch.Tensor, q: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, seen: int) -> None:
    blocks = -(-seen // SPARSE_BLOCK_SIZE)
    keys = cache.float()[pages[:blocks].long()].flatten(0, 1)
    dots = (q.float() @ keys.T).masked_fill(torch.arange(len(keys)) >= seen, float("-inf"))
    dots = dots.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    score[:, :blocks] = dots.view(len(q), blocks, SPARSE_BLOCK_SIZE).amax(-1)


def _choose(score: torch.Tensor, topk: int, init_blocks: int, local_blocks: int) -> torch.Tensor:
    """The best first; a NaN or very small score is an absent block's."""
    blocks = score.shape[1]
    ranked = score.nan_to_num(nan=-1e30, posinf=float("inf"), neginf=float("-inf"))
    block = torch.arange(blocks)
    ranked = ranked.masked_fill(block < init_blocks, 1e30).masked_fill(block >= blocks - local_blocks, 1e29)
    found = ranked.sort(-1, descending=True).indices[:, :topk].int()
    return torch.nn.functional.pad(found, (0, topk - found.shape[-1]), value=-1)
