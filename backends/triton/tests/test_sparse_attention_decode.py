"""Sparse attention with few query tokens a request, against the definition in fp64."""

import pytest
import torch
from attention_cases import BOUND, DEVICE, Batch, double, plan, poisoned, sparse_site, workspace, worst_row
from m3hal_triton.sparse_attention import sparse_attention

from m3hal.ops import load

OPERATOR = load("sparse_attention")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def _check(site, batch, extra=None):
    """Runs the kernel over poison and compares out and lse with the definition; returns out."""
    q = batch.queries(site.num_q_heads, site.head_dim)
    kv = batch.cache(site.num_kv_heads, site.head_dim, has_values=True)
    ids = batch.block_ids(site.num_kv_heads)
    batch.erase_unselected(kv, ids)
    kernel = sparse_attention(site)
    out = poisoned(batch.tokens, site.num_q_heads, site.head_dim, dtype=batch.dtype)
    lse = poisoned(batch.tokens, site.num_q_heads, dtype=torch.float32)
    before = [t.clone() for t in (q, kv.buf, ids)]
    kernel.run(q, kv, ids, plan(kernel, batch.meta), out=(out, lse), workspace=workspace(kernel))
    exact, exact_lse = OPERATOR.reference(q.double(), double(kv), ids, batch.meta, **OPERATOR.static_values(site))
    assert worst_row(out, exact) <= BOUND[batch.dtype]
    dead = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), dead)
    assert torch.allclose(lse[~dead].double(), exact_lse[~dead], atol=BOUND[batch.dtype] / 10, rtol=0)
    for tensor, old in zip((q, kv.buf, ids), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))
    return out


@DTYPES
@pytest.mark.parametrize("layout", ["hnd", "nhd"])
def test_lengths_at_block_edges(dtype, layout):
    """Decode over lengths at block boundaries +-1, short and long, with a padded and an empty request."""
    site = sparse_site(dtype, return_lse=True)
    lengths = [(1, 1), (1, 15), (1, 16), (1, 17), (0, 33), (1, 0), (1, 95)]
    _check(site, Batch(site, lengths, dtype, layout=layout, strided=layout == "nhd", extra_tokens=2))


@DTYPES
def test_verify_shares_blocks(dtype):
    """Several query tokens a request walk the union of their selections; each still sees only its own."""
    site = sparse_site(dtype, return_lse=True)
    _check(site, Batch(site, [(4, 90), (3, 35), (1, 64), (6, 70)], dtype))


@DTYPES
@pytest.mark.parametrize(("group", "page", "block"), [(1, 32, 16), (3, 16, 32), (16, 16, 16), (80, 16, 16)])
def test_groups_and_pages(dtype, group, page, block):
    """Group sizes off the matrix tile; a page of several blocks and a block of several pages."""
    site = sparse_site(dtype, num_q_heads=2 * group, page_size=page, block_size=block, return_lse=True)
    _check(site, Batch(site, [(2, 97), (1, 31)], dtype))


def test_one_program_without_splits(monkeypatch):
    """A batch too large to split writes its result directly and takes no workspace."""
    monkeypatch.setattr("m3hal_triton._sparse_decode_run.MAX_SPLIT_PROGRAMS", 1)
    site = sparse_site(torch.float32, return_lse=True)
    _check(site, Batch(site, [(1, 80), (1, 40)], torch.float32))


@DTYPES
def test_nan_of_a_neighbours_block(dtype, monkeypatch):
    """A block that only another token of the request chose may hold NaN, in one program that walks both tokens'."""
    monkeypatch.setattr("m3hal_triton._sparse_decode_run.MAX_SPLIT_PROGRAMS", 1)
    site = sparse_site(dtype)
    batch = Batch(site, [(4, 90)], dtype)
    q, kv = batch.queries(site.num_q_heads, site.head_dim), batch.cache(site.num_kv_heads, site.head_dim, True)
    ids = torch.tensor([[1, 5, -1, -1]] + [[2, 5, -1, -1]] * 3, dtype=torch.int32, device=DEVICE)
    ids = ids[:, None].repeat(1, site.num_kv_heads, 1)
    only_others = batch.block_ids(site.num_kv_heads).fill_(-1)
    only_others[:, :, :2] = torch.tensor([2, 5], dtype=torch.int32, device=DEVICE)
    batch.erase_unselected(kv, only_others)
    kernel = sparse_attention(site)
    out = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    exact = OPERATOR.reference(q.double(), double(kv), ids, batch.meta, **OPERATOR.static_values(site))
    assert out[0].isnan().all()
    assert worst_row(out[1:], exact[1:]) <= BOUND[dtype]


def test_ids_past_the_query_are_ignored():
    """A selection that names a future block or only absent ones adds nothing."""
    site = sparse_site(torch.float32)
    batch = Batch(site, [(1, 40), (1, 20)], torch.float32)
    q, kv = batch.queries(site.num_q_heads, site.head_dim), batch.cache(site.num_kv_heads, site.head_dim, True)
    ids = torch.tensor([[0, 2, 3, 9], [-1, -1, -1, -1]], dtype=torch.int32, device=DEVICE)[:, None].repeat(1, 2, 1)
    kernel = sparse_attention(site)
    out = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    assert (
        worst_row(out, OPERATOR.reference(q.double(), double(kv), ids, batch.meta, **OPERATOR.static_values(site)))
        <= 2e-5
    )


def test_repeated_runs_agree():
    """The plan serves several layers: a second run over it gives the same bits."""
    site = sparse_site(torch.bfloat16)
    batch = Batch(site, [(1, 90), (1, 50)], torch.bfloat16)
    q, kv = batch.queries(site.num_q_heads, site.head_dim), batch.cache(site.num_kv_heads, site.head_dim, True)
    ids, kernel = batch.block_ids(site.num_kv_heads), sparse_attention(site)
    planned = plan(kernel, batch.meta)
    first = kernel.run(q, kv, ids, planned, workspace=workspace(kernel))
    assert torch.equal(first, kernel.run(q, kv, ids, planned, workspace=workspace(kernel)))


def test_no_tokens():
    """Zero tokens give an empty output."""
    site = sparse_site(torch.float32)
    batch = Batch(site, [(0, 20)], torch.float32)
    kernel = sparse_attention(site)
    kv = batch.cache(site.num_kv_heads, site.head_dim, True)
    out = kernel.run(
        batch.queries(4, 32), kv, batch.block_ids(2), plan(kernel, batch.meta), workspace=workspace(kernel)
    )
    assert out.shape == (0, 4, 32)
