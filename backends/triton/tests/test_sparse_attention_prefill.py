"""Sparse attention organised by key block, against the definition in fp64."""

from dataclasses import replace

import pytest
import torch
from attention_cases import BOUND, Batch, double, plan, poisoned, sparse_site, workspace, worst_row
from m3hal_triton import sparse_attention as module
from m3hal_triton.sparse_attention import sparse_attention

from m3hal.ops import load

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
OPERATOR = load("sparse_attention")


def _inputs(site, batch):
    q = batch.queries(site.num_q_heads, site.head_dim)
    kv = batch.cache(site.num_kv_heads, site.head_dim, has_values=True)
    ids = batch.block_ids(site.num_kv_heads)
    batch.erase_unselected(kv, ids)
    return q, kv, ids


def _check(site, batch):
    """Runs the kernel over poison and compares out and lse with the definition."""
    q, kv, ids = _inputs(site, batch)
    kernel = sparse_attention(site)
    out = poisoned(batch.tokens, site.num_q_heads, site.head_dim, dtype=batch.dtype)
    lse = poisoned(batch.tokens, site.num_q_heads, dtype=torch.float32)
    kernel.run(q, kv, ids, plan(kernel, batch.meta), out=(out, lse), workspace=workspace(kernel))
    exact, exact_lse = OPERATOR.reference(q.double(), double(kv), ids, batch.meta, **OPERATOR.static_values(site))
    assert worst_row(out, exact) <= BOUND[batch.dtype]
    dead = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), dead)
    assert torch.allclose(lse[~dead].double(), exact_lse[~dead], atol=BOUND[batch.dtype] / 10, rtol=0)


@DTYPES
@pytest.mark.parametrize("layout", ["hnd", "nhd"])
def test_ragged_batch(dtype, layout):
    """A chunk behind a context, a whole prompt, a decoding, a padded and an empty request in one batch."""
    site = sparse_site(dtype, return_lse=True)
    _check(site, Batch(site, [(13, 61), (9, 9), (1, 33), (2, 0), (0, 20)], dtype, layout=layout, extra_tokens=2))


@DTYPES
@pytest.mark.parametrize(("group", "page", "block"), [(3, 32, 16), (1, 16, 32)])
def test_groups_and_pages(dtype, group, page, block):
    """Group sizes off the matrix tile; a page of several blocks and a block of several pages."""
    site = sparse_site(dtype, num_q_heads=2 * group, page_size=page, block_size=block, return_lse=True)
    _check(site, Batch(site, [(10, 70)], dtype, strided=True))


def test_pieces_and_sorts_agree(monkeypatch):
    """Small workspaces, small counters and small work items change no bit."""
    site = sparse_site(torch.bfloat16)
    batch = Batch(site, [(11, 60), (9, 40)], torch.bfloat16)
    q, kv, ids = _inputs(site, batch)
    kernel = sparse_attention(site)
    whole = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    monkeypatch.setattr(module.PREFILL, "chunk", 3)
    monkeypatch.setattr(module, "SORT_COUNTERS", 1)
    monkeypatch.setattr(module, "PREFILL_BYTES", 1)
    kernel = sparse_attention(replace(site, max_tokens=24, max_seqs=2, max_context=80))
    kernel.run._piece = 7
    pieces = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    assert torch.equal(whole, pieces)


def test_a_row_does_not_depend_on_its_batch():
    """Batch invariance, bit by bit: a request alone and among others."""
    site = sparse_site(torch.bfloat16)
    batch = Batch(site, [(9, 50), (12, 40)], torch.bfloat16)
    q, kv, ids = _inputs(site, batch)
    kernel = sparse_attention(site)
    together = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    meta = batch.meta
    alone = replace(meta, cu_q=meta.cu_q[1:] - 9, seq_lens=meta.seq_lens[1:], block_table=meta.block_table[1:])
    one = kernel.run(q[9:], kv, ids[9:], plan(kernel, alone), workspace=workspace(kernel))
    assert torch.equal(together[9:], one)
