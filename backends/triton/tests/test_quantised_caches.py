"""Attention and the indexer over caches of every format and page map, against the definition in fp64."""

from dataclasses import replace

import pytest
import torch
from attention_cases import BOUND, Batch, double, plan, poisoned, sparse_site, workspace, worst_row
from m3hal_triton.paged_attention import paged_attention
from m3hal_triton.select_blocks import block_scores, select_blocks
from m3hal_triton.sparse_attention import sparse_attention

from m3hal.layouts.stored import stored
from m3hal.ops import load

#: (activations, cache format, page map)
MAIN = [(torch.bfloat16, "fp8_e4m3", "hnd"), (torch.bfloat16, "fp8_e4m3", "nhd")]
MAIN += [
    (torch.bfloat16, "nvfp4", "planar"),
    (torch.bfloat16, "nvfp4", "msa_slot"),
    (torch.float32, "nvfp4", "msa_slot"),
]
INDEX = [*MAIN, (torch.bfloat16, "mxfp4", "msa_slot"), (torch.float32, "mxfp4", "msa_slot")]
LENGTHS = {
    "decode": [(1, 1), (1, 17), (0, 33), (1, 0), (1, 95)],
    "verify": [(4, 60), (3, 35), (1, 30)],
    "prefill": [(13, 61), (9, 9), (1, 33), (2, 0)],
}
PHASES = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def _caches(cases):
    names = ["-".join(("fp32" if dtype == torch.float32 else "bf16", *rest)) for dtype, *rest in cases]
    return pytest.mark.parametrize(("dtype", "format", "layout"), cases, ids=names)


def _agrees(run, site, op, given, exact_given, dtype, tokens):
    """Out and lse over poison, within the bound of the definition."""
    out = poisoned(tokens, site.num_q_heads, site.head_dim, dtype=dtype)
    lse = poisoned(tokens, site.num_q_heads, dtype=torch.float32)
    run(*given, out=(out, lse))
    exact, exact_lse = op.reference(*exact_given, **op.static_values(site))
    assert worst_row(out, exact) <= BOUND[dtype]
    dead = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), dead)
    assert torch.allclose(lse[~dead].double(), exact_lse[~dead], atol=BOUND[dtype] / 10, rtol=0)


@PHASES
@_caches(MAIN)
def test_sparse_attention(dtype, lengths, format, layout):
    """Decode, verify and prefill; what no token selected is NaN in codes and scales."""
    site = sparse_site(dtype, kv_format=format, return_lse=True)
    batch = Batch(site, lengths, dtype, layout=layout, strided=True, extra_tokens=2)
    q, kv = batch.queries(site.num_q_heads, 32), batch.cache(site.num_kv_heads, 32, True, format=format)
    ids = batch.block_ids(site.num_kv_heads)
    batch.erase_unselected(kv, ids)
    kernel, op = sparse_attention(site), load("sparse_attention")
    given = (q, kv, ids, plan(kernel, batch.meta))

    def run(*inputs, out):
        kernel.run(*inputs, out=out, workspace=workspace(kernel))

    _agrees(run, site, op, given, (q.double(), double(kv), ids, batch.meta), dtype, batch.tokens)


@pytest.mark.parametrize(("page", "block"), [(32, 16), (16, 32)])
@pytest.mark.parametrize("lengths", [LENGTHS["decode"], LENGTHS["prefill"]], ids=["decode", "prefill"])
def test_pages_and_blocks(lengths, page, block):
    """A page of several blocks and a block of several pages, of the format that reads most by itself."""
    dtype = torch.bfloat16
    site = sparse_site(dtype, kv_format="nvfp4", page_size=page, block_size=block, return_lse=True)
    batch = Batch(site, lengths, dtype, layout="msa_slot")
    q, kv = batch.queries(site.num_q_heads, 32), batch.cache(site.num_kv_heads, 32, True, format="nvfp4")
    ids = batch.block_ids(site.num_kv_heads)
    kernel, op = sparse_attention(site), load("sparse_attention")
    given = (q, kv, ids, plan(kernel, batch.meta))

    def run(*inputs, out):
        kernel.run(*inputs, out=out, workspace=workspace(kernel))

    _agrees(run, site, op, given, (q.double(), double(kv), ids, batch.meta), dtype, batch.tokens)


@pytest.mark.parametrize("lengths", [LENGTHS["decode"], LENGTHS["prefill"]], ids=["decode", "prefill"])
@_caches(MAIN)
def test_paged_attention(dtype, lengths, format, layout):
    """Dense attention reads what sparse attention reads."""
    site = sparse_site(dtype, kv_format=format, causal=True, window_left=20, return_lse=True)
    batch = Batch(site, lengths, dtype, layout=layout, extra_tokens=2)
    q, kv = batch.queries(site.num_q_heads, 32), batch.cache(site.num_kv_heads, 32, True, format=format)
    kernel, op = paged_attention(site), load("paged_attention")
    given = (q, kv, plan(kernel, batch.meta))

    def run(*inputs, out):
        kernel.run(*inputs, out=out, workspace=workspace(kernel))

    _agrees(run, site, op, given, (q.double(), double(kv), batch.meta), dtype, batch.tokens)


@PHASES
@_caches(INDEX)
def test_scores_and_choice(dtype, lengths, format, layout):
    """Every score, and the choice from them."""
    site = sparse_site(dtype, index_format=format)
    batch = Batch(site, lengths, dtype, layout=layout, strided=True, extra_tokens=2)
    index_q, cache = batch.queries(2, 32), batch.cache(1, 32, False, format=format)
    kernel = block_scores(site)
    out = poisoned(batch.tokens, 2, -(-batch.meta.max_k // site.block_size), dtype=torch.float32)
    kernel.run(index_q, cache, plan(kernel, batch.meta), out=out)
    exact = load("block_scores").reference(index_q.double(), double(cache), batch.meta, block_size=site.block_size)
    assert torch.equal(torch.isneginf(out), torch.isneginf(exact))
    seen = ~torch.isneginf(exact)
    assert (out[seen] - exact[seen]).abs().max() <= 1e-5 * exact[seen].abs().max()
    kernel, op = select_blocks(site), load("select_blocks")
    ids = kernel.run(index_q, cache, plan(kernel, batch.meta), workspace=workspace(kernel))
    assert torch.equal(ids, op.reference(index_q, cache, batch.meta, **op.static_values(site)))


@pytest.mark.parametrize("lengths", [LENGTHS["decode"], LENGTHS["verify"]], ids=["decode", "verify"])
def test_scores_by_warps(lengths):
    """Vectors of 128 elements, which one warp a program scores."""
    site = sparse_site(torch.bfloat16, index_format="nvfp4", index_dim=128, page_size=32)
    batch = Batch(site, lengths, torch.bfloat16, layout="msa_slot")
    index_q, cache = batch.queries(2, 128), batch.cache(1, 128, False, format="nvfp4")
    kernel = block_scores(site)
    assert kernel.run.tuning.warps == 1
    scores = kernel.run(index_q, cache, plan(kernel, batch.meta))
    exact = load("block_scores").reference(index_q.double(), cache, batch.meta, block_size=site.block_size)
    assert torch.equal(torch.isneginf(scores), torch.isneginf(exact))
    seen = ~torch.isneginf(exact)
    assert (scores[seen] - exact[seen]).abs().max() <= 1e-5 * exact[seen].abs().max()


@pytest.mark.parametrize("magnitude", [1e-30, 3e4, 1e30])
@pytest.mark.parametrize("format", ["fp8_e4m3", "nvfp4"])
def test_queries_of_any_magnitude(format, magnitude):
    """Products in fp16 take queries that fp16 can't hold."""
    site = sparse_site(torch.bfloat16, kv_format=format, scale=1 / magnitude, return_lse=True)
    batch = Batch(site, [(1, 40), (1, 17)], torch.bfloat16, layout="hnd")
    q, kv = batch.queries(4, 32) * magnitude, batch.cache(2, 32, True, format=format)
    ids = batch.block_ids(2)
    kernel, op = sparse_attention(site), load("sparse_attention")
    given = (q, kv, ids, plan(kernel, batch.meta))

    def run(*inputs, out):
        kernel.run(*inputs, out=out, workspace=workspace(kernel))

    _agrees(run, site, op, given, (q.double(), kv, ids, batch.meta), torch.bfloat16, batch.tokens)


def test_every_code_and_scale():
    """All 256 E4M3 scales over all 16 codes, bit by bit: scores of unit queries are the stored numbers."""
    site = replace(sparse_site(torch.bfloat16, index_format="nvfp4"), num_index_heads=1, block_size=16)
    batch = Batch(site, [(1, 256)], torch.bfloat16, layout="planar")
    cache = batch.cache(1, 32, False, format="nvfp4")
    part = stored(cache, "k")
    codes = torch.arange(16).repeat(2).view(16, 2)
    packed = (codes[:, 0] | codes[:, 1] << 4).to(torch.uint8)
    for position in range(256):
        page, slot = batch.table[0, position // 16], position % 16
        part.codes[page, 0, slot] = packed.to(part.codes.device)
        part.scales[page, 0, slot // 4, slot % 4] = position
    kernel, wanted = block_scores(site), load("block_scores").reference
    for element in (*range(16), 16, 31):  # every code, and the ends of the second group
        index_q = torch.zeros(1, 1, 32, dtype=torch.bfloat16, device=cache.buf.device)
        index_q[..., element] = 1.0
        scores = kernel.run(index_q, cache, plan(kernel, batch.meta))
        exact = wanted(index_q, cache, batch.meta, block_size=16)
        assert torch.equal(scores.isnan(), exact.isnan())
        assert torch.equal(scores.nan_to_num(), exact.nan_to_num())
