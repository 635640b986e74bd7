"""Sparse attention organised by key block, against the definition in fp64."""

from dataclasses import replace

import pytest
import torch
from attention_cases import BOUND, Batch, double, plan, poisoned, sparse_site, workspace, worst_row
from m3hal_triton import _sparse_prefill_run as module
from m3hal_triton import _sparse_union as union
from m3hal_triton.sparse_attention import batch_invariant, sparse_attention
from machine_cases import site as real_site

from m3hal.ops import load

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
OPERATOR = load("sparse_attention")


def _inputs(site, batch):
    q = batch.queries(site.num_q_heads, site.head_dim)
    kv = batch.cache(site.num_kv_heads, site.head_dim, True, format=site.kv_format)
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
@pytest.mark.parametrize(("group", "page", "block"), [(3, 32, 16), (1, 16, 32), (2, 96, 48)])
def test_groups_and_pages(dtype, group, page, block):
    """Group sizes off the matrix tile; pages of several blocks, blocks of several pages and of no power of two."""
    site = sparse_site(dtype, num_q_heads=2 * group, page_size=page, block_size=block, return_lse=True)
    _check(site, Batch(site, [(10, 70)], dtype, strided=True))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (0, 1), (2, 0)])
def test_queries_lie_anywhere(before, after):
    """Rows off an even element, and of an odd pitch: the same bits as from rows side by side."""
    site = sparse_site(torch.bfloat16)
    batch = Batch(site, [(13, 61), (9, 9)], torch.bfloat16)
    q, kv, ids = _inputs(site, batch)
    wide = torch.full((*q.shape[:2], before + q.shape[2] + after), float("nan"), dtype=q.dtype, device=q.device)
    wide[..., before : before + q.shape[2]] = q
    kernel = sparse_attention(site)
    planned, room = plan(kernel, batch.meta), workspace(kernel)
    moved = kernel.run(wide[..., before : before + q.shape[2]], kv, ids, planned, workspace=room)
    assert torch.equal(moved, kernel.run(q.contiguous(), kv, ids, planned, workspace=room))
    turned = q.mT.contiguous().mT
    assert turned.stride(2) != 1
    assert torch.equal(moved, kernel.run(turned, kv, ids, planned, workspace=room))


def test_padded_requests_alone():
    """Long requests without a key: rows of zeros, as an engine's warm-up asks for."""
    site = sparse_site(torch.bfloat16, return_lse=True)
    _check(site, Batch(site, [(12, 0), (9, 0)], torch.bfloat16, extra_tokens=1))


def _first_blocks(site, batch, edit):
    """out and what it should be where all tokens choose the first four blocks, whose pages ``edit`` changes."""
    q, kv = batch.queries(site.num_q_heads, site.head_dim), batch.cache(site.num_kv_heads, site.head_dim, True)
    ids = torch.arange(4, dtype=torch.int32, device=q.device).repeat(batch.tokens, site.num_kv_heads, 1)
    pages = batch.table[:, :4].long().to(q.device)
    kv.v[pages] = torch.where(kv.v[pages].isnan(), 0, batch.randn(*kv.v[pages].shape))
    edit(kv, pages)
    kernel = sparse_attention(site)
    out = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    return out, OPERATOR.reference(q.double(), double(kv), ids, batch.meta, **OPERATOR.static_values(site))


def test_blocks_that_cancel():
    """Of what is left each row has the bits that its own rounding leaves; parts in bf16 would lose two of them."""

    def edit(kv, pages):
        kv.k[pages] = 0
        kv.v[pages[:, 0], :, 0] -= 20
        kv.v[pages[:, 1], :, 0] += 20

    site = sparse_site(torch.bfloat16)
    out, exact = _first_blocks(site, Batch(site, [(12, 64), (9, 60)], torch.bfloat16), edit)
    assert worst_row(out, exact) <= 3.5e-3


@pytest.mark.parametrize("size", [2.0**-120, 2.0**-60, 2.0**-20, 2.0**20, 2.0**60, 2.0**118])
def test_values_of_any_size(size):
    """The row's power of two is its own, over all of bf16's range."""

    def edit(kv, pages):
        kv.v[pages] *= size

    site = sparse_site(torch.bfloat16)
    out, exact = _first_blocks(site, Batch(site, [(12, 64), (9, 60)], torch.bfloat16), edit)
    assert worst_row(out.double() / size, exact / size) <= BOUND[torch.bfloat16]


def test_blocks_of_unlike_sizes():
    """Small values beside a block of huge ones, of zeros, and of tiny ones."""

    def edit(kv, pages):
        kv.v[pages[0, 1]] *= 2.0**100
        kv.v[pages[1, 1]] = 0
        kv.v[pages[1, 2]] *= 2.0**-100

    site = sparse_site(torch.bfloat16)
    out, exact = _first_blocks(site, Batch(site, [(12, 64), (9, 60)], torch.bfloat16), edit)
    assert worst_row(out.double(), exact) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("size", [1.0, -2048.0, 2048.0])
def test_blocks_of_equal_scores_of_any_size(size):
    """Equal shares also where a score is over 2**24: a power of two beside it would be rounded away."""

    def edit(kv, pages):
        kv.k[pages] = size
        for block, factor in enumerate((1, 0, 4, 2.0**-20)):
            kv.v[pages[:, block]] *= factor

    site = sparse_site(torch.bfloat16)
    batch = Batch(site, [(12, 64), (9, 60)], torch.bfloat16)
    queries = batch.queries
    batch.queries = lambda *shape: torch.full_like(queries(*shape), abs(size))
    out, exact = _first_blocks(site, batch, edit)
    assert worst_row(out, exact) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_value_without_a_number(value):
    """It shows in its own column, and in no other."""

    def edit(kv, pages):
        kv.v[pages[0, 1], :, 3, 5] = value

    site = sparse_site(torch.bfloat16)
    out, exact = _first_blocks(site, Batch(site, [(12, 64), (9, 60)], torch.bfloat16), edit)
    assert torch.equal(out.isfinite(), exact.isfinite())
    assert (~exact.isfinite()).sum() == 12 * site.num_q_heads
    there = [column for column in range(site.head_dim) if column != 5]
    assert worst_row(out[..., there], exact[..., there]) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize(
    ("format", "size"), [("fp8_e4m3", 2.0**-9), ("fp8_e4m3", 448.0), ("nvfp4", 6 * 2.0**-9), ("nvfp4", 6 * 448.0)]
)
def test_the_smallest_and_the_largest_codes(format, size):
    """Of blocks of either the parts are held by the one power of two that all rows of a format share."""
    site = sparse_site(torch.bfloat16, kv_format=format)
    batch = Batch(site, [(12, 64)], torch.bfloat16, layout="hnd" if format == "fp8_e4m3" else "msa_slot")
    q, kv = batch.queries(site.num_q_heads, site.head_dim), batch.cache(2, site.head_dim, True, format=format)
    k, signs = batch.randn(64, 2, site.head_dim), batch.randn(64, 2, site.head_dim).sign()
    values = (signs * (1 + (batch.randn(64, 2, site.head_dim) > 0)) / 2 * size * kv.v_scale).bfloat16()
    position = torch.arange(64, device=q.device)
    slots = batch.table.to(q.device)[0, position // site.page_size].long() * site.page_size + position % site.page_size
    load("kv_write").reference(kv, k, values, slots)
    ids = batch.block_ids(2)
    kernel = sparse_attention(site)
    out = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    exact = OPERATOR.reference(q.double(), double(kv), ids, batch.meta, **OPERATOR.static_values(site))
    assert exact.abs().amax() > 0.4 * size * kv.v_scale
    assert worst_row(out, exact) <= BOUND[torch.bfloat16]


def test_pieces_and_sorts_agree(monkeypatch):
    """Small workspaces, small counters and small work items change no bit."""
    site = sparse_site(torch.bfloat16)
    batch = Batch(site, [(11, 60), (9, 40)], torch.bfloat16)
    q, kv, ids = _inputs(site, batch)
    kernel = sparse_attention(site)
    whole = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    monkeypatch.setattr(module.TUNING, "chunk", 3)
    monkeypatch.setattr(module, "SORT_COUNTERS", 1)
    monkeypatch.setattr(module, "MOST_BYTES", 1)
    kernel = sparse_attention(replace(site, max_tokens=24, max_seqs=2, max_context=80))
    kernel.run.prefill.piece = 7
    pieces = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    assert torch.equal(whole, pieces)


def test_a_row_does_not_depend_on_its_batch():
    """Batch invariance, bit by bit: a request alone and among others."""
    site = sparse_site(torch.bfloat16)
    batch = Batch(site, [(9, 50), (12, 40)], torch.bfloat16)
    q, kv, ids = _inputs(site, batch)
    kernel = batch_invariant(site)
    together = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    meta = batch.meta
    alone = replace(meta, cu_q=meta.cu_q[1:] - 9, seq_lens=meta.seq_lens[1:], block_table=meta.block_table[1:])
    one = kernel.run(q[9:], kv, ids[9:], plan(kernel, alone), workspace=workspace(kernel))
    assert torch.equal(together[9:], one)


@pytest.fixture
def walked(monkeypatch):
    """Lets units walk in small batches, too; (units that began to walk, that stayed, all) of each call."""
    seen = []
    shipped = union.Walk.attend

    def attend(walk, *given):
        began = int((walk.sizes > 0).sum())
        shipped(walk, *given)
        seen.append((began, int((walk.sizes > 0).sum()), walk.units))

    monkeypatch.setattr(union.Walk, "attend", attend)
    monkeypatch.setattr(union, "LEAST", 0)
    return seen


@pytest.mark.parametrize("format", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize(("page", "block", "group"), [(16, 16, 2), (64, 16, 4), (32, 32, 8), (96, 96, 2)])
def test_units_that_walk_beside_others(walked, monkeypatch, page, block, group, format):
    """Tiles of one request, with their own edges and starts off a block, walk; tiles of two requests don't."""
    monkeypatch.setitem(union.WALKS, format, union.Tuning(price=3))
    shape = {"num_q_heads": 2 * group, "page_size": page, "block_size": block, "kv_format": format}
    site = sparse_site(torch.bfloat16, return_lse=True, **shape)
    lengths = [(13, 61), (9, 9), (1, 33), (2, 0), (0, 20), (24, 130)]
    _check(site, Batch(site, lengths, torch.bfloat16, extra_tokens=2, strided=True))
    ((began, stayed, units),) = walked
    assert 0 < began == stayed < units


def test_a_union_larger_than_its_list_is_sorted(walked, monkeypatch):
    """More blocks than a unit keeps."""
    monkeypatch.setitem(union.WALKS, "bfloat16", union.Tuning(price=0))
    monkeypatch.setattr(union, "MOST", 4)
    site = sparse_site(torch.bfloat16, return_lse=True)
    _check(site, Batch(site, [(16, 180), (16, 16)], torch.bfloat16))
    assert walked == [(4, 4, 8)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_a_neighbour_chose_may_hold_anything(walked, value):
    """A block of NaN or infinities spoils the rows that chose it, and no other of their unit."""
    site = sparse_site(torch.bfloat16, return_lse=True)
    batch = Batch(site, [(16, 60)], torch.bfloat16)
    q, kv = batch.queries(site.num_q_heads, site.head_dim), batch.cache(2, site.head_dim, has_values=True)
    ids = torch.tensor([1, 3, -1, -1], dtype=torch.int32, device=q.device).repeat(16, 2, 1)
    ids[5] = torch.tensor([0, 1, 3, -1])
    kv.v[batch.table[0, 0], 0] = value
    kv.k[batch.table[0, 0], 1] = value
    kernel = sparse_attention(site)
    out, lse = kernel.run(q, kv, ids, plan(kernel, batch.meta), workspace=workspace(kernel))
    exact, exact_lse = OPERATOR.reference(q.double(), double(kv), ids, batch.meta, **OPERATOR.static_values(site))
    clean = torch.arange(16, device=q.device) != 5
    assert worst_row(out[clean], exact[clean]) <= BOUND[torch.bfloat16]
    assert torch.allclose(lse[clean].double(), exact_lse[clean], atol=BOUND[torch.bfloat16] / 10, rtol=0)
    assert not out[5].isfinite().all(-1).any()
    assert walked == [(4, 2, 4)]


@pytest.mark.parametrize(("processors", "none"), [(6, False), (7, True)])
def test_few_units_are_sorted(walked, monkeypatch, processors, none):
    """Where fewer units would walk than there are multiprocessors, none does."""
    monkeypatch.setattr(union, "LEAST", 1)
    monkeypatch.setattr(module, "multiprocessors", lambda device: processors)
    site = sparse_site(torch.bfloat16, return_lse=True)
    touched, shipped = [], union.Walk.attend

    def attend(walk, q, kv, batch, out, lse):
        shipped(walk, q, kv, batch, out, lse)
        touched.append(not out.isnan().all())

    monkeypatch.setattr(union.Walk, "attend", attend)
    _check(site, Batch(site, [(16, 16), (9, 9), (9, 9)], torch.bfloat16))
    assert walked == [(6, 6, 10)]
    assert touched == [not none]


@pytest.mark.parametrize("megabytes", [1, 8, 256])
@pytest.mark.parametrize("most", [603, 640, 1024])
def test_the_sort_stays_in_its_memory(most, megabytes, monkeypatch):
    """In few pieces and in many, and with so many counters that not all pieces are sorted together."""
    site = replace(sparse_site(torch.bfloat16), max_tokens=most, max_seqs=1, max_context=614400, top_k_blocks=64)
    slots = 614400 // site.block_size * site.num_kv_heads
    monkeypatch.setattr(module, "SORT_COUNTERS", 2 * slots)  # of two pieces
    monkeypatch.setattr(module, "MOST_BYTES", megabytes << 20)
    run = sparse_attention(site).run.prefill
    memory = torch.empty(16 * run.sort_words, dtype=torch.uint8)
    for n in range(1, min(most, 2 * run.piece) + 1):
        for fewer in (1, 7, slots):
            sort = module.Sort(memory, n, run.piece, fewer, site.num_kv_heads * 64)
            parts = (sort.ranks, sort.order, sort.work, sort.counts, sort.starts, sort.items, sort.totals)
            assert sum(part.numel() for part in parts) <= run.sort_words
            assert (sort.pieces - 1) * sort.piece < n <= sort.pieces * sort.piece <= sort.pieces * run.piece


def test_many_requests_of_long_contexts_leave_room_for_pieces():
    """Where the sort's counters alone fill the workspace, a piece is still of many tokens."""
    site = replace(real_site("sparse_attention", "bfloat16"), max_seqs=1024, max_context=1 << 20)
    run = sparse_attention(site).run.prefill
    assert run.piece >= 64
    assert run.workspace_bytes >= run.sort_bytes + run.piece * 64 * 16 * 264


@pytest.mark.parametrize("most", [63, 64, 8191])
def test_partial_results_are_aligned(most):
    """They begin at a multiple of 256 bytes, so that they are stored 16 bytes at a time."""
    assert sparse_attention(sparse_site(torch.float32, max_tokens=most)).run.prefill.sort_bytes % 256 == 0


def test_wide_heads_do_not_walk():
    """Heads of more elements than a walk's registers hold are sorted."""
    site = replace(real_site("sparse_attention", "bfloat16"), head_dim=256)
    assert not sparse_attention(site).run.prefill._walks
    assert sparse_attention(replace(site, head_dim=128)).run.prefill._walks
