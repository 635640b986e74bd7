"""The batch-invariant variants: a request has the same bits alone and in any batch."""

from dataclasses import replace

import pytest
import torch
from attention_cases import Batch, plan, sparse_site, workspace
from m3hal_triton import paged_attention, select_blocks, sparse_attention

FORMATS = pytest.mark.parametrize("format", ["bfloat16", "nvfp4"])
LENGTHS = [(1, 50), (12, 40), (2, 30)]


def _alone(meta, request):
    """The metadata of one request, and its tokens."""
    first, last = meta.cu_q[request : request + 2].tolist()
    cu_q = torch.tensor([0, last - first], dtype=torch.int32, device=meta.cu_q.device)
    rows = slice(request, request + 1)
    one = replace(meta, cu_q=cu_q, seq_lens=meta.seq_lens[rows], block_table=meta.block_table[rows], max_q=last - first)
    return one, slice(first, last)


def _run(kernel, *given):
    return kernel.run(*given, **({"workspace": workspace(kernel)} if kernel.workspace_bytes else {}))


@FORMATS
def test_attention(format):
    """A decoding request beside a prompt, and alone."""
    site = sparse_site(torch.bfloat16, kv_format=format, causal=True, window_left=-1)
    batch = Batch(site, LENGTHS, torch.bfloat16)
    q, kv = batch.queries(4, 32), batch.cache(2, 32, True, format=format)
    ids = batch.block_ids(2)
    for kernel, chosen in (
        (sparse_attention.batch_invariant(site), (ids,)),
        (paged_attention.batch_invariant(site), ()),
    ):
        together = _run(kernel, q, kv, *chosen, plan(kernel, batch.meta))
        for request in range(len(LENGTHS)):
            meta, rows = _alone(batch.meta, request)
            one = _run(kernel, q[rows], kv, *(i[rows] for i in chosen), plan(kernel, meta))
            assert torch.equal(together[rows], one)


@FORMATS
def test_indexer(format):
    """Scores and choices."""
    site = sparse_site(torch.bfloat16, index_format=format)
    batch = Batch(site, LENGTHS, torch.bfloat16)
    index_q, cache = batch.queries(2, 32), batch.cache(1, 32, False, format=format)
    for make in (select_blocks.block_scores_batch_invariant, select_blocks.select_blocks_batch_invariant):
        kernel = make(site)
        together = _run(kernel, index_q, cache, plan(kernel, batch.meta))
        for request in range(len(LENGTHS)):
            meta, rows = _alone(batch.meta, request)
            one = _run(kernel, index_q[rows], cache, plan(kernel, meta))
            assert torch.equal(together[rows][..., : one.shape[-1]], one)
