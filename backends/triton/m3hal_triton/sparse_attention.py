"""``sparse_attention``: each query attends to the key blocks that the indexer chose for it."""

from __future__ import annotations

from functools import partial

import torch
import triton

from m3hal.dispatch.manifest import Kernel
from m3hal.layouts import PagedCache
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._launch import LOG2_E, common_power_of_two, dot_precision, power_of_two_below
from m3hal_triton._plan import TARGET_PROGRAMS, BatchPlan, plan_batch, plan_bytes
from m3hal_triton._sparse_decode import attend

#: query tokens of one request that share a program, and so the reading of a block
MAX_QUERY_TILE = 4
#: rows of the matrix unit's smallest tile
MIN_ROWS = 16


def sparse_attention(site: Site) -> Kernel:
    """The kernel for a site: split-K decode with an in-kernel merge."""
    bounds = {"max_tokens": site.max_tokens, "max_seqs": site.max_seqs, "block_size": site.block_size}
    return Kernel(
        run=_Run(site),
        workspace_bytes=_decode_workspace(site),
        plan_batch=partial(plan_batch, **bounds),
        plan_bytes=plan_bytes(site.max_tokens, site.max_seqs),
    )


def _decode_workspace(site: Site) -> int:
    """Bytes of the partial sums: fewer than twice TARGET_PROGRAMS programs are ever split."""
    group = site.num_q_heads // site.num_kv_heads
    rows = max(MIN_ROWS, triton.next_power_of_2(MAX_QUERY_TILE * group))
    return 4 * 2 * TARGET_PROGRAMS * rows * (site.head_dim + 2)


class _Run:
    """``run(q, kv, block_ids, batch, out=None, workspace=None)``."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._group = site.num_q_heads // site.num_kv_heads
        self._keys = min(common_power_of_two(site.block_size, site.page_size), 64)
        self._fake = partial(load("sparse_attention").fake, return_lse=site.return_lse)

    def __call__(
        self,
        q: torch.Tensor,
        kv: PagedCache,
        block_ids: torch.Tensor,
        batch: BatchPlan,
        out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        result = self._fake(q, kv, block_ids, batch.meta) if out is None else out
        if q.shape[0] and batch.meta.seq_lens.shape[0]:
            self._decode(q, kv, block_ids, batch, result, workspace)
        return result

    def _decode(self, q, kv, block_ids, batch, result, workspace) -> None:
        site, meta = self._site, batch.meta
        output, lse = result if site.return_lse else (result, result)
        requests = meta.seq_lens.shape[0]
        tile = min(triton.next_power_of_2(max(meta.max_q, 1)), MAX_QUERY_TILE)
        chunks = triton.cdiv(max(meta.max_q, 1), tile)
        programs = requests * chunks * site.num_kv_heads
        splits = min(power_of_two_below(TARGET_PROGRAMS // programs), power_of_two_below(site.top_k_blocks))
        k, v = kv.k, kv.v
        attend[(splits, site.num_kv_heads, requests * chunks)](
            q,
            k,
            v,
            block_ids,
            meta.cu_q,
            meta.seq_lens,
            meta.block_table,
            batch.counters,
            q if splits == 1 else workspace.view(torch.float32),
            output,
            lse,
            site.scale * LOG2_E,
            q.shape[0],
            requests,
            chunks,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *block_ids.stride(),
            *meta.block_table.stride(),
            *output.stride(),
            *lse.stride()[:2],
            GROUP=self._group,
            ROWS=max(MIN_ROWS, triton.next_power_of_2(tile * self._group)),
            QT=tile,
            DIM=site.head_dim,
            IDS=block_ids.shape[2],
            IDS_PADDED=triton.next_power_of_2(block_ids.shape[2]),
            BLOCK=site.block_size,
            PAGE=site.page_size,
            KEYS=self._keys,
            SPLITS=splits,
            LSE=site.return_lse,
            PRECISION=dot_precision(q.dtype),
            num_warps=4,
            num_stages=3,
        )
