"""``sparse_attention`` by vLLM's split decode where few tokens are verified, and by m3hal-triton's kernels elsewhere.

vLLM's kernel takes requests of one query length each. Here every token is given to it as a request of its own, whose
length is the token's position plus one and whose pages are its request's, which the batch plan writes down once a
forward. So ragged and padded batches are the same to it. A row without any key comes out of its merge as NaN; the
kernel below makes it zeros. Sums over a part of the blocks are rounded to bf16 before they are merged, which the
manifest declares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from m3hal_triton import sparse_attention as portable
from m3hal_triton._launch import after, programmatic
from vllm.models.minimax_m3.common.ops.sparse_attn import minimax_m3_sparse_attn_decode

from m3hal.dispatch.manifest import Kernel
from m3hal.layouts import PagedCache
from m3hal.ops import SeqMeta, load
from m3hal.shape import Site
from m3hal_nvidia.vllm_limits import FEW_TOKENS

_ALIGN = 256


@dataclass(frozen=True)
class TokenBatch:
    """A batch as m3hal-triton plans it, and by tokens.

    lengths: int32 [FEW_TOKENS], how many keys each of the first tokens may see; 0 in a padded request or in none.
    table: int32 [FEW_TOKENS, pages], their requests' rows of the block table.
    """

    meta: SeqMeta
    planned: Any
    lengths: torch.Tensor
    table: torch.Tensor


def sparse_attention(site: Site) -> Kernel:
    """The kernel for a site."""
    rest = portable.sparse_attention(site)
    few, pages = min(FEW_TOKENS, site.max_tokens), -(-site.max_context // site.page_size)
    own = -(-rest.plan_bytes // _ALIGN) * _ALIGN
    return Kernel(
        run=partial(_run, site, rest, partial(load("sparse_attention").fake, return_lse=False)),
        workspace_bytes=rest.workspace_bytes,
        plan_batch=partial(_plan, rest, own, few, pages),
        plan_bytes=own + 4 * few * (1 + pages),
    )


def _plan(rest: Kernel, own: int, few: int, pages: int, meta: SeqMeta, storage: torch.Tensor) -> TokenBatch:
    assert rest.plan_batch is not None
    planned = rest.plan_batch(meta, storage[:own])
    words = storage[own:].view(torch.int32)
    width = min(meta.block_table.shape[1], pages)
    lengths, table = words[:few], words[few : few + few * width].view(few, width)
    if meta.seq_lens.shape[0]:
        torch.add(planned.position[:few], 1, out=lengths)
        torch.index_select(meta.block_table[:, :width], 0, planned.request[:few].clamp(min=0), out=table)
    return TokenBatch(meta, planned, lengths, table)


def _run(
    site: Site,
    rest: Kernel,
    fake: Any,
    q: torch.Tensor,
    kv: PagedCache,
    block_ids: torch.Tensor,
    batch: TokenBatch,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    tokens, meta = q.shape[0], batch.meta
    if not 0 < tokens <= FEW_TOKENS or meta.max_q < 2 or not meta.seq_lens.shape[0]:
        result: torch.Tensor = rest.run(q, kv, block_ids, batch.planned, out, workspace)
        return result
    result = fake(q, kv, block_ids, meta) if out is None else out
    lengths, heads = batch.lengths[:tokens], site.num_kv_heads
    minimax_m3_sparse_attn_decode(
        q,
        kv.buf.view(torch.float8_e4m3fn) if site.kv_format == "fp8_e4m3" else kv.buf,
        block_ids.transpose(0, 1),
        batch.table[:tokens],
        lengths,
        heads,
        site.scale,
        result,
        1,
        k_scale=kv.k_scale,
        v_scale=kv.v_scale,
    )
    group, early = site.num_q_heads // heads, programmatic(q.device)
    _blank[(tokens, heads)](
        result,
        block_ids,
        lengths,
        result.stride(),
        block_ids.stride(),
        K=block_ids.shape[2],
        K_PADDED=triton.next_power_of_2(block_ids.shape[2]),
        BLOCK=site.block_size,
        GROUP=group,
        GROUP_PADDED=triton.next_power_of_2(group),
        DIM=site.head_dim,
        EARLY=early,
        num_warps=1,
        **after(early),
    )
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _blank(  # type: ignore[no-untyped-def]
    out,
    block_ids,
    lengths,
    out_strides,
    id_strides,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    EARLY: tl.constexpr,  # launched while the merge runs, which waited for all before it
):
    """Zeros where no id of the row names a block that it may see."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.arange(0, K_PADDED)
    at = block_ids + token * id_strides[0] + head * id_strides[1] + slot * id_strides[2]
    block = tl.load(at, mask=slot < K, other=-1)
    seen = (block >= 0) & (block * BLOCK < tl.load(lengths + token))
    rows = tl.where(tl.max(seen.to(tl.int32), 0) == 0, GROUP, 0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row, dim = tl.arange(0, GROUP_PADDED)[:, None], tl.arange(0, DIM)[None, :]
    to = out + token * out_strides[0] + (head * GROUP + row) * out_strides[1] + dim * out_strides[2]
    tl.store(to, tl.zeros((GROUP_PADDED, DIM), out.dtype.element_ty), mask=row < rows)
