"""What every attention kernel needs to know once per forward, computed on the device at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from m3hal.ops import SeqMeta
from m3hal_triton._launch import Again, multiprocessors

_TOKENS = 256
#: programs that a plan divides the blocks among at most; 8 numbers each
MAX_SHARES = 2304
_SHARES = 32
#: splits of different tokens and heads that are counted
ARRIVALS = 1024


class Kept(NamedTuple):
    """Launches of an operator over a plan, what they depend on but addresses, and the workspace that they use."""

    workspace: object
    key: object
    launches: Sequence[Again]


@dataclass(frozen=True)
class BatchPlan:
    """A SeqMeta and what the kernels derive from it.

    request, position: int32 [max_tokens], of each query token; -1 for a token that belongs to no request, position -1
        in a padded request. first_block: int32 [max_seqs + 1], blocks of all requests before this one;
        a request without query tokens counts none.
    shares: int32 [programs, 8], equal shares of all blocks: the first block and the end, counted over all requests; the
        request of the first, its first block and end; its first query token and their end; its length.
    arrivals: int32, zeros, of a plan without shares: counters of splits, which return to zero.
    calls: what an operator launched over this plan, for the model's next layer to launch again.
    """

    meta: SeqMeta
    request: torch.Tensor
    position: torch.Tensor
    first_block: torch.Tensor
    shares: torch.Tensor
    arrivals: torch.Tensor
    calls: dict[object, Kept] = field(default_factory=dict, compare=False, repr=False)

    def keep(self, caller: object, workspace: object, key: object, launches: Sequence[Again | None]) -> None:
        """Notes what ``caller`` launched, if all of it can be launched again."""
        known = [launch for launch in launches if launch is not None]
        if len(known) == len(launches):
            self.calls[caller] = Kept(workspace, key, known)


def plan_bytes(max_tokens: int, max_seqs: int) -> int:
    """Bytes of storage that :func:`plan_batch` fills."""
    return 4 * (8 * MAX_SHARES + 2 * max_tokens + max_seqs + 1)


def plan_batch(
    meta: SeqMeta, storage: torch.Tensor, *, max_tokens: int, max_seqs: int, block_size: int, programs: int = 0
) -> BatchPlan:
    """Fills the storage from a SeqMeta by one launch that reads lengths on the device only.

    programs: number of shares for each multiprocessor.
    """
    words = storage.view(torch.int32)
    sizes = [8 * MAX_SHARES, max_tokens, max_tokens, max_seqs + 1]
    shares, request, position, first_block = words[: sum(sizes)].split(sizes)
    count = min(programs * multiprocessors(storage.device), MAX_SHARES)
    padded = triton.next_power_of_2(max(max_seqs, 1))
    groups = triton.cdiv(max_tokens, _TOKENS)
    _plan[(1 + groups + triton.cdiv(count, _SHARES),)](
        meta.cu_q,
        meta.seq_lens,
        request,
        position,
        first_block,
        shares,
        max_tokens,
        meta.seq_lens.shape[0],
        groups,
        count,
        BLOCK=block_size,
        TOKENS=_TOKENS,
        REQUESTS=padded,
        STEPS=padded.bit_length(),
        SHARES=_SHARES,
        ARRIVALS=0 if count else ARRIVALS,
    )
    return BatchPlan(meta, request, position, first_block, shares[: 8 * count].view(count, 8), shares[:ARRIVALS])


@triton.jit
def _blocks(cu_q, seq_lens, requests, BLOCK: tl.constexpr, REQUESTS: tl.constexpr):
    """Blocks of each request, [REQUESTS]."""
    b = tl.arange(0, REQUESTS)
    blocks = tl.cdiv(tl.load(seq_lens + b, mask=b < requests, other=0), BLOCK)
    begin = tl.load(cu_q + b, mask=b < requests, other=0)
    end = tl.load(cu_q + b + 1, mask=b < requests, other=0)
    return tl.where(end > begin, blocks, 0)


@triton.jit(do_not_specialize=["max_tokens", "requests", "groups", "count"])
def _plan(
    cu_q,
    seq_lens,
    request_out,
    position_out,
    first_block_out,
    share_out,
    max_tokens,
    requests,
    groups,  # programs that place tokens
    count,  # shares
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    REQUESTS: tl.constexpr,
    STEPS: tl.constexpr,
    SHARES: tl.constexpr,
    ARRIVALS: tl.constexpr,
):
    """Program 0 sums blocks over requests; ``groups`` place TOKENS tokens each, the others fill SHARES shares each."""
    program = tl.program_id(0)
    b = tl.arange(0, REQUESTS)
    if program == 0:
        ends = tl.cumsum(_blocks(cu_q, seq_lens, requests, BLOCK, REQUESTS), 0)
        tl.store(first_block_out + 1 + b, ends, mask=b < requests)
        tl.store(first_block_out, 0)
        if ARRIVALS > 0:
            tl.store(share_out + tl.arange(0, ARRIVALS), tl.zeros((ARRIVALS,), tl.int32))
        return
    if program > groups:
        blocks = _blocks(cu_q, seq_lens, requests, BLOCK, REQUESTS)
        ends = tl.cumsum(blocks, 0)
        everything = tl.sum(blocks, 0)
        size = tl.maximum(tl.cdiv(everything, count), 1)
        share = (program - 1 - groups) * SHARES + tl.arange(0, SHARES)
        at = share * size
        stop = tl.minimum(at + size, everything)
        owner = tl.sum((ends[None, :] <= at[:, None]).to(tl.int32), 1)
        mine = b[None, :] == owner[:, None]
        end = tl.sum(tl.where(mine, ends[None, :], 0), 1)
        base = end - tl.sum(tl.where(mine, blocks[None, :], 0), 1)
        some = (share < count) & (owner < requests)
        to = share_out + share * 8
        tl.store(to, at, mask=share < count)
        tl.store(to + 1, stop, mask=share < count)
        tl.store(to + 2, owner, mask=share < count)
        tl.store(to + 3, base, mask=share < count)
        tl.store(to + 4, end, mask=share < count)
        tl.store(to + 5, tl.load(cu_q + owner, mask=some, other=0), mask=share < count)
        tl.store(to + 6, tl.load(cu_q + owner + 1, mask=some, other=0), mask=share < count)
        tl.store(to + 7, tl.load(seq_lens + owner, mask=some, other=0), mask=share < count)
        return
    token = (program - 1) * TOKENS + tl.arange(0, TOKENS)
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
