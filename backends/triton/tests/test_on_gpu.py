"""What needs a GPU: MiniMax-M3's real shapes, and graphs replayed over changed lengths."""

from dataclasses import replace

import pytest
import torch
from attention_cases import BOUND, Batch, double, plan, poisoned, workspace, worst_row
from m3hal_triton import _sparse_union as union
from m3hal_triton.paged_attention import paged_attention
from m3hal_triton.select_blocks import block_scores, select_blocks
from m3hal_triton.sparse_attention import sparse_attention
from machine_cases import site as real_site

from m3hal.ops import load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the interpreter runs the small cases")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
DECODE = [(1, 1), (1, 127), (1, 128), (1, 129), (1, 2049), (1, 0), (0, 50), (1, 4000)]
VERIFY = [(4, 3000), (2, 129), (4, 700)]
PREFILL = [(300, 2500), (129, 129), (1, 700), (0, 9)]
LENGTHS = pytest.mark.parametrize("lengths", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])


def _name(dtype):
    return str(dtype).removeprefix("torch.")


STORED = [("", "hnd"), ("", "nhd"), ("fp8_e4m3", "hnd"), ("nvfp4", "msa_slot"), ("nvfp4", "planar")]


@DTYPES
@LENGTHS
@pytest.mark.parametrize(("format", "layout"), STORED, ids=["-".join(m) for m in STORED])
@pytest.mark.parametrize("heads", [(64, 4), (16, 1)], ids=["TP1", "TP4"])
def test_sparse_attention(dtype, lengths, format, layout, heads):
    """Out and lse within the bound of the definition in fp64."""
    site = real_site("sparse_attention", _name(dtype), format or None)
    site = replace(site, num_q_heads=heads[0], num_kv_heads=heads[1], return_lse=True)
    batch = Batch(site, lengths, dtype, layout=layout, strided=True, extra_tokens=3)
    q, kv = batch.queries(heads[0], 128), batch.cache(heads[1], 128, True, format=format)
    ids = batch.block_ids(heads[1])
    batch.erase_unselected(kv, ids)
    kernel = sparse_attention(site)
    out = poisoned(batch.tokens, heads[0], 128, dtype=dtype)
    lse = poisoned(batch.tokens, heads[0], dtype=torch.float32)
    kernel.run(q, kv, ids, plan(kernel, batch.meta), out=(out, lse), workspace=workspace(kernel))
    op = load("sparse_attention")
    exact, exact_lse = op.reference(q.double(), double(kv), ids, batch.meta, **op.static_values(site))
    assert worst_row(out, exact) <= BOUND[dtype]
    dead = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), dead)
    assert torch.allclose(lse[~dead].double(), exact_lse[~dead], atol=BOUND[dtype] / 10, rtol=0)


@pytest.mark.parametrize("format", ["", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [(64, 4), (16, 1)], ids=["TP1", "TP4"])
def test_prompts_whose_tokens_walk_together(format, heads, monkeypatch):
    """The first tokens of prompts choose the same blocks; later ones, and tiles of two requests, are sorted."""
    monkeypatch.setattr(union, "LEAST", 0)
    test_sparse_attention(torch.bfloat16, [(1203, 1203), (300, 2500), (1, 700), (520, 9000)], format, "hnd", heads)


@DTYPES
@LENGTHS
@pytest.mark.parametrize("format", ["", "fp8_e4m3", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("heads", [4, 1], ids=["TP1", "TP4"])
def test_scores_and_choice(dtype, lengths, format, heads):
    """Scores within the bound, choices equal to the definition's over the same scores."""
    site = replace(real_site("sparse_attention", _name(dtype), format or None), num_index_heads=heads)
    batch = Batch(site, lengths, dtype, layout="hnd", strided=True, extra_tokens=3)
    index_q, cache = batch.queries(heads, 128), batch.cache(1, 128, False, format=format)
    kernel = block_scores(site)
    scores = poisoned(batch.tokens, heads, -(-batch.meta.max_k // 128), dtype=torch.float32)
    kernel.run(index_q, cache, plan(kernel, batch.meta), out=scores)
    exact = load("block_scores").reference(index_q.double(), double(cache), batch.meta, block_size=128)
    assert torch.equal(torch.isneginf(scores), torch.isneginf(exact))
    seen = ~torch.isneginf(exact)
    assert (scores[seen] - exact[seen]).abs().max() <= 2e-6 * exact[seen].abs().max()

    kernel = select_blocks(site)
    ids = torch.full((batch.tokens, heads, 16), 77, dtype=torch.int32, device="cuda")
    kernel.run(index_q, cache, plan(kernel, batch.meta), out=ids, workspace=workspace(kernel))
    visible = torch.tensor(batch.positions(), device="cuda") // 128 + 1
    op = load("topk_blocks")
    assert torch.equal(ids, op.reference(scores, visible.int(), **op.static_values(site)))


@DTYPES
@LENGTHS
@pytest.mark.parametrize(("causal", "window"), [(True, -1), (False, 2047)], ids=["dense", "drafter"])
@pytest.mark.parametrize("format", ["", "fp8_e4m3", "nvfp4"])
def test_paged_attention(dtype, lengths, causal, window, format):
    """Dense layers, and the drafter's window, within the bound of the definition in fp64."""
    site = real_site("dense_attention", _name(dtype), format or None)
    site = replace(site, causal=causal, window_left=window, return_lse=True, block_size=128)
    batch = Batch(site, lengths, dtype, layout="nhd", extra_tokens=3)
    q, kv = batch.queries(64, 128), batch.cache(4, 128, True, format=format)
    kernel, op = paged_attention(site), load("paged_attention")
    out = poisoned(batch.tokens, 64, 128, dtype=dtype)
    lse = poisoned(batch.tokens, 64, dtype=torch.float32)
    kernel.run(q, kv, plan(kernel, batch.meta), out=(out, lse), workspace=workspace(kernel))
    exact, exact_lse = op.reference(q.double(), double(kv), batch.meta, **op.static_values(site))
    assert worst_row(out, exact) <= BOUND[dtype]
    dead = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), dead)
    assert torch.allclose(lse[~dead].double(), exact_lse[~dead], atol=BOUND[dtype] / 10, rtol=0)


def test_dense_attention_of_a_long_prompt_beside_many_decodes():
    """As many tiles for every request as the longest has would be more than a grid takes along an axis."""
    site = replace(real_site("dense_attention", "bfloat16"), max_seqs=256, block_size=128)
    site = replace(site, num_q_heads=16, num_kv_heads=1)
    batch = Batch(site, [(4096, 4096)] + [(1, 40)] * 160, torch.bfloat16, extra_tokens=3)
    q, kv = batch.queries(16, 128), batch.cache(1, 128, True)
    kernel, op = paged_attention(site), load("paged_attention")
    out = kernel.run(q, kv, plan(kernel, batch.meta), workspace=workspace(kernel))
    exact = op.reference(q.double(), double(kv), batch.meta, **op.static_values(site))
    assert worst_row(out, exact) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("format", ["bfloat16", "fp8_e4m3", "nvfp4"])
def test_decode_graph_replayed_over_other_lengths(format):
    """Captured at the maximum, replayed with other lengths and tables: what an eager run gives, bit by bit."""
    site = real_site("sparse_attention", "bfloat16", format)
    lengths = [[(1, 4000)] * 6, [(1, 17), (1, 4000), (1, 128), (1, 0), (1, 2500), (1, 129)], [(1, 900)] * 6]
    batches = [Batch(site, some, torch.bfloat16, seed=3) for some in lengths]
    select, attend = select_blocks(site), sparse_attention(site)
    scratch = [workspace(select), workspace(attend)]
    storage = [torch.empty(k.plan_bytes, dtype=torch.uint8, device="cuda") for k in (select, attend)]
    blocks = max(b.meta.block_table.shape[1] for b in batches)
    pages = max(b.pages for b in batches)

    def inputs(batch):
        kv = batch.cache(4, 128, True, strided=False, format=format)
        keys = batch.cache(1, 128, False, strided=False, format=format)
        table = torch.nn.functional.pad(batch.meta.block_table, (0, blocks - batch.meta.block_table.shape[1]))
        fill = [torch.cat([c.buf, c.buf[:1].expand(pages - len(c.buf), *c.buf.shape[1:])]) for c in (kv, keys)]
        return (
            [batch.queries(64, 128).clone(), batch.queries(4, 128).clone(), batch.meta.seq_lens, table, *fill],
            kv,
            keys,
        )

    first, kv, keys = inputs(batches[0])
    q, index_q, seq_lens, table, kv_buf, key_buf = static = [t.clone() for t in first]
    kv, keys = replace(kv, buf=kv_buf), replace(keys, buf=key_buf)
    meta = replace(batches[0].meta, seq_lens=seq_lens, block_table=table, max_k=4096)
    ids = torch.empty(6, 4, 16, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)

    def step():
        select.run(index_q, keys, select.plan_batch(meta, storage[0]), ids, scratch[0])
        attend.run(q, kv, ids, attend.plan_batch(meta, storage[1]), out, scratch[1])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in batches:
        for tensor, value in zip(static, inputs(batch)[0], strict=True):
            tensor.copy_(value)
        graph.replay()
        replayed = [ids.clone(), out.clone()]
        ids.fill_(77)
        out.fill_(float("nan"))
        step()
        assert torch.equal(replayed[0], ids)
        assert torch.equal(replayed[1], out)
        op = load("sparse_attention")
        exact = op.reference(q.double(), double(kv), ids, meta, **op.static_values(site))
        assert worst_row(out, exact) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize(
    "lengths", [DECODE, [(1, 300)] * 64, VERIFY, [(1, 9000)]], ids=["few", "many", "verify", "one"]
)
@pytest.mark.parametrize("format", ["bfloat16", "fp8_e4m3", "nvfp4"])
def test_one_plan_for_several_layers(format, lengths):
    """Later layers repeat launches with other addresses: ids and rows as over plans of their own."""
    site = real_site("sparse_attention", "bfloat16", format)
    batch = Batch(site, lengths, torch.bfloat16, extra_tokens=3)
    kernels = select_blocks(site), sparse_attention(site)
    scratch = [workspace(kernel) for kernel in kernels]

    def step(index_q, keys, q, kv, plans):
        ids = torch.full((batch.tokens, 4, 16), 77, dtype=torch.int32, device="cuda")
        out = poisoned(batch.tokens, 64, 128, dtype=torch.bfloat16)
        for space in scratch:
            space.fill_(255)
        kernels[0].run(index_q, keys, plans[0], ids, scratch[0])
        kernels[1].run(q, kv, ids, plans[1], out, scratch[1])
        return ids, out

    shared = [plan(kernel, batch.meta) for kernel in kernels]
    for _ in range(5):
        layer = batch.queries(4, 128), batch.cache(1, 128, False, format=format)
        layer += batch.queries(64, 128), batch.cache(4, 128, True, format=format)
        alone = step(*layer, [plan(kernel, batch.meta) for kernel in kernels])
        for found, expected in zip(step(*layer, shared), alone, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("format", ["bfloat16", "fp8_e4m3", "nvfp4"])
def test_a_cache_beyond_2_to_the_31_elements(format):
    """64-bit offsets: the last pages of a cache of more than 2**31 elements, in attention and in the indexer."""
    site = replace(real_site("sparse_attention", "bfloat16", format), num_q_heads=16, num_kv_heads=1)
    batch = Batch(site, [(1, 300), (20, 200)], torch.bfloat16)
    q, ids = batch.queries(16, 128), batch.block_ids(1)
    index_q = batch.queries(4, 128)
    small, keys = batch.cache(1, 128, True, format=format), batch.cache(1, 128, False, format=format)
    attend, score = sparse_attention(site), block_scores(site)
    for lengths in ([(1, 300), (20, 200)], [(1, 300), (1, 200)]):
        count = sum(n for n, _ in lengths)
        cu_q = torch.tensor([0, 1, count], dtype=torch.int32, device="cuda")
        for kernel, cache, given in ((attend, small, (q[:count], ids[:count])), (score, keys, (index_q[:count],))):
            pages = 2**31 // cache.buf[0].numel() + 64
            buffer = torch.empty(pages, *cache.buf.shape[1:], dtype=cache.buf.dtype, device="cuda")
            buffer[-batch.pages :] = cache.buf
            near_meta = replace(batch.meta, cu_q=cu_q, max_q=max(n for n, _ in lengths))
            far_meta = replace(near_meta, block_table=batch.meta.block_table + (pages - batch.pages))
            scratch = {"workspace": workspace(kernel)} if kernel.workspace_bytes else {}
            results = [
                kernel.run(given[0], held, *given[1:], plan(kernel, meta), **scratch)
                for held, meta in ((cache, near_meta), (replace(cache, buf=buffer), far_meta))
            ]
            assert torch.equal(*results)
