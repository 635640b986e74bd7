"""Dense attention over a paged cache, against the definition in fp64."""

import pytest
import torch
from attention_cases import BOUND, Batch, double, plan, poisoned, sparse_site, workspace, worst_row
from m3hal_triton import paged_attention as module
from m3hal_triton.paged_attention import paged_attention
from m3hal_triton.sparse_attention import sparse_attention

from m3hal.ops import load

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
DECODE = [(1, 1), (1, 16), (1, 17), (1, 0), (0, 9), (1, 95)]
PREFILL = [(13, 40), (9, 9), (1, 33), (2, 0)]
#: whose tiles are counted: one long request among many short ones
RAGGED = [(1, 33), (0, 9), (41, 60), (1, 1), (2, 0), (1, 17), (0, 4), (1, 20)]


@DTYPES
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, RAGGED], ids=["decode", "prefill", "ragged"])
@pytest.mark.parametrize(("causal", "window"), [(True, -1), (False, -1), (True, 20), (False, 5)])
def test_against_the_definition(dtype, lengths, causal, window):
    """Causal and not, windowed and not, over ragged lengths, padded requests and loose tokens."""
    site = sparse_site(dtype, causal=causal, window_left=window, return_lse=True)
    _check(site, Batch(site, lengths, dtype, layout="nhd" if causal else "hnd", extra_tokens=2))


def test_ragged_in_parts(monkeypatch):
    """Tiles that are counted, each over several programs."""
    monkeypatch.setattr(module, "multiprocessors", lambda device: 400)
    site = sparse_site(torch.float32, causal=True, window_left=-1, return_lse=True)
    _check(site, Batch(site, RAGGED, torch.float32, extra_tokens=2))


def test_without_a_workspace():
    """Nothing is split where there is no room for parts."""
    site = sparse_site(torch.float32, causal=True, window_left=-1, return_lse=True)
    _check(site, Batch(site, DECODE, torch.float32), room=False)


def _check(site, batch, room=True):
    """Runs the kernel over poison and compares out and lse with the definition."""
    dtype = batch.dtype
    q, kv = batch.queries(site.num_q_heads, 32), batch.cache(site.num_kv_heads, 32, True)
    kernel, op = paged_attention(site), load("paged_attention")
    out = poisoned(batch.tokens, site.num_q_heads, 32, dtype=dtype)
    lse = poisoned(batch.tokens, site.num_q_heads, dtype=torch.float32)
    extra = {"workspace": workspace(kernel)} if room else {}
    kernel.run(q, kv, plan(kernel, batch.meta), out=(out, lse), **extra)
    exact, exact_lse = op.reference(q.double(), double(kv), batch.meta, **op.static_values(site))
    assert worst_row(out, exact) <= BOUND[dtype]
    dead = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), dead)
    assert torch.allclose(lse[~dead].double(), exact_lse[~dead], atol=BOUND[dtype] / 10, rtol=0)


@pytest.mark.parametrize("group", [1, 3, 16, 80])
def test_groups(group):
    """Group sizes off the matrix tile."""
    site = sparse_site(torch.bfloat16, num_q_heads=2 * group, causal=True, window_left=-1)
    batch = Batch(site, [(4, 50), (1, 20)], torch.bfloat16)
    q, kv = batch.queries(2 * group, 32), batch.cache(2, 32, True)
    kernel, op = paged_attention(site), load("paged_attention")
    out = kernel.run(q, kv, plan(kernel, batch.meta), workspace=workspace(kernel))
    exact = op.reference(q.double(), double(kv), batch.meta, **op.static_values(site))
    assert worst_row(out, exact) <= BOUND[torch.bfloat16]


def test_no_requests():
    """Tokens without any request are rows of zeros, in both attention operators."""
    site = sparse_site(torch.float32, causal=True, window_left=-1, return_lse=True)
    batch = Batch(site, [], torch.float32, extra_tokens=3)
    q, kv = batch.queries(4, 32), batch.cache(2, 32, True)
    for make, extra in ((paged_attention, ()), (sparse_attention, (batch.block_ids(2),))):
        kernel = make(site)
        out, lse = poisoned(3, 4, 32, dtype=torch.float32), poisoned(3, 4, dtype=torch.float32)
        kernel.run(q, kv, *extra, plan(kernel, batch.meta), out=(out, lse), workspace=workspace(kernel))
        assert not out.any()
        assert torch.isneginf(lse).all()
