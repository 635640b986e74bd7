"""``sparse_attention``: each query attends to the key blocks that the indexer chose for it."""

from __future__ import annotations

from functools import partial

import torch

from m3hal.dispatch.manifest import Kernel
from m3hal.layouts import PagedCache
from m3hal.ops import load
from m3hal.shape import Site
from m3hal_triton._decode import check_alignment
from m3hal_triton._plan import BatchPlan, plan_batch, plan_bytes
from m3hal_triton._sparse_decode_run import Decode
from m3hal_triton._sparse_prefill_run import Prefill

#: query tokens of a request up to which it is decoded or verified, not prefilled
FEW_TOKENS = 8

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def sparse_attention(site: Site) -> Kernel:
    """The kernel for a site: split-K decode, and prefill organised by key block."""
    return _kernel(site, _Run(site))


def batch_invariant(site: Site) -> Kernel:
    """The same, where a request's rows have the same bits alone and in any batch: all tokens go through prefill.

    A decode's splits depend on how many requests share the GPU, and with them the order of its sums.
    """
    return _kernel(site, _Run(site, few_tokens=0))


def _kernel(site: Site, run: _Run) -> Kernel:
    bounds = {"max_tokens": site.max_tokens, "max_seqs": site.max_seqs, "block_size": site.block_size}
    return Kernel(
        run=run,
        workspace_bytes=run.workspace_bytes,
        plan_batch=partial(plan_batch, **bounds),
        plan_bytes=plan_bytes(site.max_tokens, site.max_seqs),
    )


class _Run:
    """``run(q, kv, block_ids, batch, out=None, workspace=None)``; a request of up to ``few_tokens`` is decoded."""

    def __init__(self, site: Site, few_tokens: int = FEW_TOKENS) -> None:
        self._site = site
        self._few_tokens = few_tokens
        self._fake = partial(load("sparse_attention").fake, return_lse=site.return_lse)
        self.decode = Decode(site)
        self.prefill = Prefill(site, walks=few_tokens > 0)
        many = self.prefill.workspace_bytes if site.max_tokens > few_tokens else 0
        self.workspace_bytes = max(self.decode.workspace_bytes, many)

    def __call__(
        self,
        q: torch.Tensor,
        kv: PagedCache,
        block_ids: torch.Tensor,
        batch: BatchPlan,
        out: Output | None = None,
        workspace: torch.Tensor | None = None,
    ) -> Output:
        result = self._fake(q, kv, block_ids, batch.meta) if out is None else out
        output, lse = result if self._site.return_lse else (result, result)
        if self.decode.again(q, kv, block_ids, batch, output, lse, workspace):
            return result
        check_alignment(kv)
        if q.shape[0] and batch.meta.seq_lens.shape[0]:
            run = self.decode.run if batch.meta.max_q <= self._few_tokens else self.prefill.run
            run(q, kv, block_ids, batch, output, lse, workspace)
        else:
            output.zero_()
            if self._site.return_lse:
                lse.fill_(float("-inf"))
        return result
