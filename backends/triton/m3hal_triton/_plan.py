"""What every attention kernel needs to know once per forward, computed on the device at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from m3hal.ops import SeqMeta

_TOKENS = 256


@dataclass(frozen=True)
class BatchPlan:
    """A SeqMeta and what the kernels derive from it.

    request, position: int32 [max_tokens], of each query token; -1 for a token that belongs to no request, position -1
        in a padded request. first_block: int32 [max_seqs + 1], blocks of all requests before this one;
        a request without query tokens counts none.
    """

    meta: SeqMeta
    request: torch.Tensor
    position: torch.Tensor
    first_block: torch.Tensor


def plan_bytes(max_tokens: int, max_seqs: int) -> int:
    """Bytes of storage that :func:`plan_batch` fills."""
    return 4 * (2 * max_tokens + max_seqs + 1)


def plan_batch(meta: SeqMeta, storage: torch.Tensor, *, max_tokens: int, max_seqs: int, block_size: int) -> BatchPlan:
    """Fills the storage from a SeqMeta by one launch that reads lengths on the device only."""
    words = storage.view(torch.int32)
    sizes = [max_tokens, max_tokens, max_seqs + 1]
    request, position, first_block = words[: sum(sizes)].split(sizes)
    requests = meta.seq_lens.shape[0]
    padded = triton.next_power_of_2(max(requests, 1))
    _plan[(triton.cdiv(max_tokens, _TOKENS) + 1,)](
        meta.cu_q,
        meta.seq_lens,
        request,
        position,
        first_block,
        max_tokens,
        requests,
        BLOCK=block_size,
        TOKENS=_TOKENS,
        REQUESTS=padded,
        STEPS=padded.bit_length(),
    )
    return BatchPlan(meta, request, position, first_block)


@triton.jit
def _plan(
    cu_q,
    seq_lens,
    request_out,
    position_out,
    first_block_out,
    max_tokens,
    requests,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    REQUESTS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Program 0 sums blocks over requests; each other one places TOKENS tokens."""
    if tl.program_id(0) == 0:
        b = tl.arange(0, REQUESTS)
        blocks = tl.cdiv(tl.load(seq_lens + b, mask=b < requests, other=0), BLOCK)
        begin = tl.load(cu_q + b, mask=b < requests, other=0)
        end = tl.load(cu_q + b + 1, mask=b < requests, other=0)
        blocks = tl.where(end > begin, blocks, 0)
        tl.store(first_block_out + 1 + b, tl.cumsum(blocks, 0), mask=b < requests)
        tl.store(first_block_out, 0)
        return
    token = (tl.program_id(0) - 1) * TOKENS + tl.arange(0, TOKENS)
    # the request of a token: how many requests end at or before it
    request = tl.zeros((TOKENS,), tl.int32)
    for halving in tl.static_range(STEPS):
        probe = tl.minimum(request + (REQUESTS >> halving), requests)
        request = tl.where(tl.load(cu_q + probe) <= token, probe, request)
    owned = request < requests
    last = tl.load(cu_q + request + 1, mask=owned, other=0)
    seq_len = tl.load(seq_lens + request, mask=owned, other=0)
    position = tl.where(owned & (seq_len > 0), seq_len - (last - token), -1)
    inside = token < max_tokens
    tl.store(request_out + token, tl.where(owned, request, -1), mask=inside)
    tl.store(position_out + token, position, mask=inside)
