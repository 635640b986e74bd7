"""The indexer against its definition: scores, choice, and both in one."""

from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, Batch, double, plan, poisoned, sparse_site, workspace
from m3hal_triton._launch import programmatic
from m3hal_triton.select_blocks import block_scores, select_blocks
from machine_cases import site as real_site

from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import load

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
DECODE = [(1, 1), (1, 15), (1, 16), (1, 17), (0, 33), (1, 0), (1, 130)]
VERIFY = [(3, 100), (4, 18), (1, 64)]
PREFILL = [(9, 70), (1, 33), (0, 5), (2, 0)]


def _inputs(site, lengths, dtype, **options):
    batch = Batch(site, lengths, dtype, **options)
    return batch, batch.queries(site.num_index_heads, site.index_dim), batch.cache(1, site.index_dim, False)


@DTYPES
@pytest.mark.parametrize("lengths", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])
@pytest.mark.parametrize(("page", "block"), [(16, 16), (16, 32), (32, 16), (48, 96)])
def test_scores(dtype, lengths, page, block):
    """Every score, -inf in the same places, NaN past the end never read."""
    site = sparse_site(dtype, page_size=page, block_size=block)
    batch, index_q, cache = _inputs(site, lengths, dtype, extra_tokens=2, strided=page == 32)
    kernel = block_scores(site)
    blocks = -(-batch.meta.max_k // block)
    out = poisoned(batch.tokens, site.num_index_heads, blocks, dtype=torch.float32)
    kernel.run(index_q, cache, plan(kernel, batch.meta), out=out)
    exact = load("block_scores").reference(index_q.double(), double(cache), batch.meta, block_size=block)
    assert torch.equal(torch.isneginf(out), torch.isneginf(exact))
    seen = ~torch.isneginf(exact)
    assert (out[seen] - exact[seen]).abs().max() <= 1e-5 * exact[seen].abs().max()


@DTYPES
@pytest.mark.parametrize("lengths", [DECODE, VERIFY, PREFILL], ids=["decode", "verify", "prefill"])
@pytest.mark.parametrize(("heads", "forced"), [(2, (0, 1)), (3, (1, 2))])
def test_choice(dtype, lengths, heads, forced):
    """The definition's ids; random scores are distinct enough that rounding changes no choice."""
    site = sparse_site(dtype, num_index_heads=heads, init_blocks=forced[0], local_blocks=forced[1])
    batch, index_q, cache = _inputs(site, lengths, dtype, extra_tokens=2, layout="nhd")
    kernel = select_blocks(site)
    out = torch.full((batch.tokens, heads, 4), 77, dtype=torch.int32, device=DEVICE)
    planned = plan(kernel, batch.meta)
    kernel.run(index_q, cache, planned, out=out, workspace=workspace(kernel))
    op = load("select_blocks")
    assert torch.equal(out, op.reference(index_q, cache, batch.meta, **op.static_values(site)))
    again = kernel.run(index_q, cache, planned, workspace=workspace(kernel))
    assert torch.equal(out, again)


def test_prefill_in_pieces(monkeypatch):
    """A workspace for less than all tokens: the pieces together are the whole."""
    site = sparse_site(torch.float32)
    batch, index_q, cache = _inputs(site, [(12, 50), (9, 9)], torch.float32)
    kernel = select_blocks(site)
    whole = kernel.run(index_q, cache, plan(kernel, batch.meta), workspace=workspace(kernel))
    rows = site.num_index_heads * -(-batch.meta.max_k // site.block_size)
    pieces = kernel.run(index_q, cache, plan(kernel, batch.meta), workspace=workspace(kernel)[: 4 * rows * 8])
    assert torch.equal(whole, pieces)


def test_rows_of_no_request_need_no_room(monkeypatch):
    """A small request among many rows of padding: scores of all of them at once are more than the workspace."""
    monkeypatch.setattr("m3hal_triton.select_blocks.SCORE_BYTES", 1)
    site = replace(sparse_site(torch.float32), max_seqs=1, max_context=1024)
    batch, index_q, cache = _inputs(site, [(4, 1024)], torch.float32, extra_tokens=60)
    kernel, op = select_blocks(site), load("select_blocks")
    ids = kernel.run(index_q, cache, plan(kernel, batch.meta), workspace=workspace(kernel))
    assert torch.equal(ids, op.reference(index_q, cache, batch.meta, **op.static_values(site)))


def test_visible_nan_makes_its_block_nan():
    """A visible NaN spoils the score of its block and of no other; it then loses to every number."""
    site = sparse_site(torch.float32)
    batch, index_q, cache = _inputs(site, [(1, 90), (12, 60)], torch.float32)
    for request in (0, 1):
        cache.buf[batch.table[request, 1], 0, 3] = float("nan")
    for kernel in (block_scores(site),):
        scores = kernel.run(index_q, cache, plan(kernel, batch.meta))
        exact = load("block_scores").reference(index_q, cache, batch.meta, block_size=site.block_size)
        assert torch.equal(scores.isnan(), exact.isnan())
        assert exact.isnan().any()


def test_tiles_are_of_caches_whose_pages_are_whole_rows_apart():
    """A second cache with the same rows, whose pages are not, doesn't get the first one's kernel."""
    site = real_site("sparse_attention", "bfloat16")
    run, tiles = select_blocks(site).run, []
    layout = KVLayout("hnd", "bfloat16", site.page_size, 1, site.index_dim, has_values=False)
    for gap in (0, 64):
        size = site.page_size * site.index_dim
        buffer = torch.empty(3, size + gap, dtype=torch.bfloat16)[:, :size].view(3, 1, site.page_size, site.index_dim)
        _, settings = run._few_settings(PagedCache(buffer, layout), 1, True, True, False)
        tiles.append(settings.constants["TILES"])
    assert tiles == [True, False]


def test_repeated_launches_ask_for_a_descriptor_only_where_there_was_one(monkeypatch):
    """Two addresses of the scores change from layer to layer, and the tile's only where tiles are copied."""
    changing = []
    monkeypatch.setattr("m3hal_triton._launch.Launcher.again", lambda self, launch, places: changing.append(places))
    site = replace(real_site("sparse_attention", "bfloat16"), max_context=4096)
    batch = Batch(site, [(1, 300)], torch.bfloat16)
    kernel, cache = select_blocks(site), batch.cache(1, 128, False)
    kernel.run(batch.queries(4, 128), cache, plan(kernel, batch.meta), workspace=workspace(kernel))
    assert changing[0] == ((0, 1, 8) if programmatic(batch.meta.cu_q.device) else (0, 1))


def test_a_layer_that_gives_no_output_repeats_launches_too(monkeypatch):
    """vLLM's layers pass none: what the plan keeps is launched for a new one."""
    site = sparse_site(torch.float32)
    batch, index_q, cache = _inputs(site, [(1, 90), (1, 50)], torch.float32)
    kernel, planned, room = select_blocks(site), plan(select_blocks(site), batch.meta), workspace(select_blocks(site))
    first = kernel.run(index_q, cache, planned, workspace=room)
    repeated = []
    monkeypatch.setattr("m3hal_triton.select_blocks._repeat", lambda *given: repeated.append(given[3]) or True)
    planned.calls[kernel.run] = "kept"
    ids = kernel.run(index_q, cache, planned, workspace=room)
    assert len(repeated) == 1
    assert repeated[0] is ids
    assert ids.shape == first.shape
