"""Attention over chosen blocks as vLLM's kernels do it: pages of one block, keys and values side by side."""

import torch

SPARSE_BLOCK_SIZE = 128


def minimax_m3_sparse_attn(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, last = cu_seqlens_q[request : request + 2].tolist()
        assert last - first <= max_query_len
        for token in range(first, last):
            seen = min(int(prefix_lens[request]) + token - first + 1, seq_len)
            row, ids = block_table[request], topk_idx[:, token]
            output[token] = _row(q[token], kv_cache, ids, row, seen, 1, sm_scale, k_scale, v_scale)


def minimax_m3_sparse_attn_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
    decode_query_len: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    total_q, _, head_dim = q.shape
    assert total_q == seq_lens.shape[0] * decode_query_len
    assert kv_cache.shape[1:] == (num_kv_heads, SPARSE_BLOCK_SIZE, 2 * head_dim)
    assert topk_idx.shape[:2] == (num_kv_heads, total_q) and output.shape == q.shape
    target = max(1, min(topk_idx.shape[-1], 256 // max(1, total_q * num_kv_heads)))
    chunks = 1 << (target.bit_length() - 1)
    for token in range(total_q):
        request = token // decode_query_len
        seen = int(seq_lens[request]) - decode_query_len + token % decode_query_len + 1
        row = block_table[request]
        output[token] = _row(q[token], kv_cache, topk_idx[:, token], row, seen, chunks, sm_scale, k_scale, v_scale)


def _row(
    q: torch.Tensor,
    cache: torch.Tensor,
    ids: torch.Tensor,
    pages: torch.Tensor,
    seen: int,
    chunks: int,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """One query token [heads, dim]: partial results of chunks of its blocks, rounded to q's dtype, and their merge."""
    groups, dim = cache.shape[1], q.shape[-1]
    blocks = max(0, -(-seen // SPARSE_BLOCK_SIZE))
    size = -(-ids.shape[-1] // chunks)
    rows = []
    for group, queries in enumerate(q.view(groups, -1, dim)):
        given = ids[group, : min(ids.shape[-1], blocks)].tolist()
        parts, weights = [], []
        for chunk in range(chunks):
            chosen = [block for block in given[chunk * size : (chunk + 1) * size] if 0 <= block < blocks]
            if not chosen:
                parts.append(torch.zeros(queries.shape))
                weights.append(torch.full(queries.shape[:1], float("-inf")))
                continue
            k, v = _keys_and_values(cache, group, chosen, pages, seen, q.dtype, k_scale, v_scale)
            scores = queries.float() @ k.float().T * scale
            scores = scores - scores.nan_to_num(nan=float("-inf")).amax(-1, keepdim=True)
            p = scores.exp()
            total = p.sum(-1, keepdim=True)
            parts.append(((p.to(v.dtype).float() @ v.float()) / total).to(q.dtype).float())
            weights.append(_lse(queries, k, scale))
        lse = torch.stack(weights)
        share = torch.exp(lse - lse.amax(0))  # without any key: NaN
        share = share / share.sum(0)
        rows.append((torch.stack(parts) * share[..., None]).sum(0))
    return torch.cat(rows).to(q.dtype)


def _lse(queries: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.logsumexp(queries.float() @ k.float().T * scale, -1)


def _keys_and_values(
    cache: torch.Tensor,
    group: int,
    blocks: list[int],
    pages: torch.Tensor,
    seen: int,
    dtype: torch.dtype,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In q's dtype, into which an fp8 number times its scale is rounded."""
    position = (torch.tensor(blocks)[:, None] * SPARSE_BLOCK_SIZE + torch.arange(SPARSE_BLOCK_SIZE)).flatten()
    page = pages[position // SPARSE_BLOCK_SIZE].long()
    both = cache[page, group, position % SPARSE_BLOCK_SIZE][position < seen]
    if both.element_size() > 1:
        return both.chunk(2, -1)
    k, v = both.to(dtype).chunk(2, -1)
    if k_scale is None or v_scale is None:
        return k, v
    return (k * k_scale.float()).to(dtype), (v * v_scale.float()).to(dtype)
