"""Grids of launches: a GPU takes 2**31 - 1 programs along the first axis, and 65535 along each of the others."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_cases import BOUND, DEVICE, Batch, double, plan, sparse_site, workspace, worst_row
from m3hal_triton import (
    _sparse_decode_run,
    _sparse_prefill_run,
    paged_attention,
    select_blocks,
    sparse_attention,
    topk_blocks,
)

from m3hal.layouts import KVLayout
from m3hal.ops import SeqMeta, load

#: programs along the second and the third axis
MOST = 65535
#: a few more tokens than programs of an axis
TOKENS = MOST + 9


class Recorder:
    """Takes the launches of a kernel."""

    interpreted = True

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        return lambda *given, **constants: self.grids.append(grid)

    def __call__(self, grid, *given):
        self.grids.append(grid)


@pytest.fixture
def record(monkeypatch):
    """Replaces a kernel of a module by a recorder."""

    def replaced(module, name):
        recorder = Recorder()
        monkeypatch.setattr(module, name, recorder)
        return recorder.grids

    return replaced


def _fits(grids):
    return grids and all(axis <= MOST for grid in grids for axis in grid[1:])


def _meta(q_lens, seq_len=64):
    cu_q = torch.tensor([0, *q_lens], device=DEVICE).cumsum(0).int()
    lengths = torch.full((len(q_lens),), seq_len, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(len(q_lens), seq_len // 16, dtype=torch.int32, device=DEVICE)
    return SeqMeta(cu_q, lengths, table, max(q_lens), seq_len)


@pytest.mark.parametrize("make", [paged_attention.paged_attention, paged_attention.batch_invariant])
def test_a_long_prompt_beside_many_decodes(record, make):
    """Dense attention has a program for each tile, not as many for each request as the longest one has."""
    grids, _ = record(paged_attention, "attend_dense"), record(paged_attention, "merge_splits")
    site = replace(sparse_site(torch.bfloat16), max_tokens=8192, max_seqs=256, causal=True, window_left=-1)
    meta = _meta([7937] + [1] * 255, 8192)
    q = torch.empty(8192, site.num_q_heads, site.head_dim, dtype=torch.bfloat16, device=DEVICE)
    kv = KVLayout("hnd", "bfloat16", 16, site.num_kv_heads, site.head_dim, has_values=True).empty(1, DEVICE)
    batch = SimpleNamespace(meta=meta, request=meta.cu_q)
    room = torch.empty(make(site).workspace_bytes, dtype=torch.uint8, device=DEVICE)
    make(site).run(q, kv, batch, workspace=room)
    assert _fits(grids)
    assert grids[0][0] <= 8192 // 8 + 256


def test_choices_of_many_tokens(record):
    """A row of a choice is a program."""
    grids = record(topk_blocks, "_launch")
    site = sparse_site(torch.float32)
    scores = torch.empty(TOKENS, 2, 3, device=DEVICE)
    visible = torch.ones(TOKENS, dtype=torch.int32, device=DEVICE)
    topk_blocks.topk_blocks(site)(scores, visible)
    assert _fits(grids)
    assert sum(grid[1] for grid in grids) == TOKENS


def test_choices_of_a_long_chunk(record):
    """The indexer's pieces are no longer than a grid."""
    grids, _ = record(topk_blocks, "_launch"), record(select_blocks, "score_many")
    site = replace(sparse_site(torch.bfloat16), max_tokens=TOKENS)
    kernel, meta = select_blocks.select_blocks(site), _meta([TOKENS])
    index_q = torch.empty(TOKENS, site.num_index_heads, site.index_dim, dtype=torch.bfloat16, device=DEVICE)
    keys = KVLayout("hnd", "bfloat16", 16, 1, site.index_dim, has_values=False).empty(1, DEVICE)
    batch = SimpleNamespace(meta=meta, position=meta.cu_q.expand(2).repeat(TOKENS)[:TOKENS], calls={})
    room = torch.empty(kernel.workspace_bytes, dtype=torch.uint8, device=DEVICE)
    kernel.run(index_q, keys, batch, workspace=room)
    assert _fits(grids)
    assert sum(grid[1] for grid in grids) == TOKENS


@pytest.mark.parametrize("make", [paged_attention.paged_attention, sparse_attention.sparse_attention])
def test_parts_of_tokens_of_no_request_have_room(monkeypatch, make):
    """One small request and many rows of padding: parts are of all of them, and stay in the workspace."""
    for module in (paged_attention, _sparse_decode_run):
        monkeypatch.setattr(module, "MAX_SPLIT_PROGRAMS", 64)
    monkeypatch.setattr(_sparse_prefill_run, "MOST_BYTES", 1)
    monkeypatch.setattr(_sparse_prefill_run, "SORT_COUNTERS", 1)
    site = sparse_site(torch.float32, causal=True, window_left=-1)
    batch = Batch(site, [(2, 200)], torch.float32, extra_tokens=60)
    kernel, op = make(site), load(make.__name__)
    ids = (batch.block_ids(2),) if make is sparse_attention.sparse_attention else ()
    q, kv = batch.queries(4, 32), batch.cache(2, 32, True)
    out = kernel.run(q, kv, *ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    exact = op.reference(q.double(), double(kv), *ids, batch.meta, **op.static_values(site))
    assert worst_row(out, exact) <= BOUND[torch.float32]
