"""sparse_attention: exactly the selected, visible keys; nothing else exists."""

import math

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows, assert_same_bits, worst_row
from m3hal_conformance.inputs import attention_inputs, batch, boundary_lengths, generator

from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import SeqMeta
from m3hal.ops.kv_write import kv_write
from m3hal.ops.paged_attention import paged_attention
from m3hal.ops.sparse_attention import sparse_attention

BLOCK, DIM, HEADS, GROUPS, K = 16, 64, 8, 2, 4
STATIC = {"scale": DIM**-0.5, "block_size": BLOCK, "return_lse": True}


class Case:
    """A batch, its data, and ids that each row and group chooses for itself, its own block among them."""

    def __init__(self, lengths, *, page=BLOCK, format="float32", kind="hnd", k=K):
        rng = generator(f"sparse/{lengths}/{k}")
        self.requests = batch(lengths, page, rng)
        self.meta = self.requests.meta
        self.data = attention_inputs(self.requests, HEADS, GROUPS, DIM, BLOCK, rng)
        self.q = self.data.q.to(getattr(torch, format))
        layout = KVLayout(kind, format, page, GROUPS, DIM, True)
        self.cache = self.requests.cache(layout, self.data.keys, self.data.values, kv_write)
        self.ids = torch.full((self.requests.tokens, GROUPS, k), -1, dtype=torch.int32)
        for t, position in enumerate(self.meta.positions(self.requests.tokens).tolist()):
            for group in range(GROUPS if position >= 0 else 0):
                own = position // BLOCK
                others = torch.randperm(own, generator=rng)[: k - 1].tolist()
                chosen = sorted([*others, own])
                self.ids[t, group, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)

    def arguments(self, **changed):
        given = {"q": self.q, "kv": self.cache, "block_ids": self.ids, "meta": self.meta, **changed}
        return tuple(given.values())

    def by_hand(self):
        """One token and head at a time over an explicit list of keys, in fp64: out and lse."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -math.inf, dtype=torch.float64)
        for request, (queries, length) in enumerate(self.requests.lengths):
            for i, t in enumerate(range(*self.requests.rows(request).indices(len(self.q)))):
                position = length - queries + i
                for head in range(HEADS if length else 0):
                    group = head // (HEADS // GROUPS)
                    chosen = set(self.ids[t, group].tolist())
                    keys = [s for s in range(position + 1) if s // BLOCK in chosen]
                    if keys:
                        k, v = (side[request][keys, group].double() for side in (self.data.keys, self.data.values))
                        scores = (k @ self.q[t, head].double()) * DIM**-0.5
                        lse[t, head] = scores.logsumexp(0)
                        out[t, head] = (scores - lse[t, head]).exp() @ v
        return out, lse


MIXED = [(1, 150), (21, 21), (5, 43), (0, 20), (3, 0), (1, 1), (8, 129)]


@pytest.mark.parametrize("kind", ["hnd", "nhd"])
@pytest.mark.parametrize(("format", "bound"), [("float32", 2e-6), ("bfloat16", 4e-3)])
def test_a_mixed_batch(run, kind, format, bound):
    """Decode, prefill, chunks, padded requests, in pages shuffled among NaN."""
    case = Case(MIXED, kind=kind, format=format)
    out, lse = run("sparse_attention", *case.arguments(), **STATIC)
    expected, expected_lse = case.by_hand()
    assert_rows(out, expected, bound)
    assert_rows(lse[..., None], expected_lse[..., None], 2e-6, floor=1.0)
    padded = case.requests.rows(4)
    assert not out[padded].any()
    assert lse[padded].eq(-math.inf).all()
    assert out.dtype == case.q.dtype
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("length", boundary_lengths(BLOCK, 7 * BLOCK))
def test_lengths_at_block_boundaries(run, length):
    """Contexts on both sides of k blocks, next to every boundary."""
    case = Case([(min(3, length), length)])
    assert_rows(run("sparse_attention", *case.arguments(), **STATIC)[0], case.by_hand()[0], 2e-6)


@pytest.mark.parametrize("page", [1, 4, 64])
def test_pages_are_not_blocks(run, page):
    """Pages smaller and larger than a block."""
    case = Case(MIXED, page=page)
    assert_rows(run("sparse_attention", *case.arguments(), **STATIC)[0], case.by_hand()[0], 2e-6)


def test_dense_beyond_the_selection_is_another_function(run):
    """Dense attention equals it up to k blocks of context, and fails the bound beyond."""
    dense = {"scale": DIM**-0.5, "causal": True, "window_left": -1, "return_lse": False}
    short = Case([(K * BLOCK, K * BLOCK)])
    out = run("sparse_attention", *short.arguments(), **{**STATIC, "return_lse": False})
    assert_rows(out, paged_attention(short.q, short.cache, short.meta, **dense), 2e-6)
    long = Case([(8, 8 * BLOCK)])
    out = run("sparse_attention", *long.arguments(), **STATIC)[0]
    assert worst_row(paged_attention(long.q, long.cache, long.meta, **dense), out).error > 0.05


def test_a_dropped_block_fails_the_bound(run):
    """Each selected block counts in every row: the inputs are made for it."""
    case = Case([(4, 150)])
    expected = case.by_hand()[0]
    for slot in range(K):
        ids = case.ids.clone()
        ids[..., slot] = -1
        out = run("sparse_attention", *case.arguments(block_ids=ids), **STATIC)[0]
        assert worst_row(out, expected).error > 0.01


def test_empty_selection(run):
    """All -1: zeros and -inf, and no NaN, in that row alone."""
    case = Case([(3, 50)])
    clean, _ = run("sparse_attention", *case.arguments(), **STATIC)
    case.ids[1] = -1
    case.ids[2, 0] = -1
    out, lse = run("sparse_attention", *case.arguments(), **STATIC)
    assert not out[1].any()
    assert lse[1].eq(-math.inf).all()
    assert not out[2, : HEADS // GROUPS].any()
    assert_same_bits(out[0], clean[0])
    assert_same_bits(out[2, HEADS // GROUPS :], clean[2, HEADS // GROUPS :])


def test_ids_that_select_nothing(run):
    """-1 is no address, nor is a block past the query's own, past the sequence, or past the table."""
    case = Case([(1, 5 * BLOCK + 3)])
    case.ids[:] = torch.tensor([0, -1, -1, -1])
    plain = run("sparse_attention", *case.arguments(), **STATIC)[0]
    assert plain.isfinite().all()
    for tail in ([0, -1, 6, -1], [0, 6, 7, 1_000_000], [0, -2, -1000, 2**31 - 1]):
        ids = torch.tensor(tail, dtype=torch.int32).expand(1, GROUPS, K)
        assert_same_bits(run("sparse_attention", *case.arguments(block_ids=ids), **STATIC)[0], plain)


def test_future_blocks_stay_hidden(run):
    """In a chunk, a block that a later token may see is not visible to an earlier one that names it."""
    case = Case([(40, 40)])
    before = run("sparse_attention", *case.arguments(), **STATIC)[0]
    case.ids[:BLOCK, :, 1] = 2  # rows of block 0 name block 2
    assert_same_bits(run("sparse_attention", *case.arguments(), **STATIC)[0], before)


@pytest.mark.parametrize("stale", [math.nan, 1e4, 0.0, math.inf])
def test_leftovers_past_the_end(run, stale):
    """The tail of the last page holds an earlier request's keys and values: the same bits whatever they are."""
    case = Case([(1, 300), (2, 37)])
    clean = run("sparse_attention", *case.arguments(), **STATIC)
    for request, (_, length) in enumerate(case.requests.lengths):
        last = int(case.meta.block_table[request, (length - 1) // BLOCK])
        case.cache.buf[last, :, length % BLOCK :] = stale
    for mine, theirs in zip(run("sparse_attention", *case.arguments(), **STATIC), clean, strict=True):
        assert_same_bits(mine, theirs)


def test_blocks_not_selected_do_not_matter(run):
    """Everything that no row selects turned into NaN: the same bits."""
    case = Case([(1, 200), (1, 170)])
    case.ids[:] = torch.tensor([1, 4, 10, -1])
    clean = run("sparse_attention", *case.arguments(), **STATIC)[0]
    for request in range(2):
        for block in set(range(11)) - {1, 4, 10}:
            case.cache.buf[int(case.meta.block_table[request, block])] = math.nan
    assert_same_bits(run("sparse_attention", *case.arguments(), **STATIC)[0], clean)


def test_a_visible_nan_is_seen(run):
    """A NaN value reaches the rows that see it and no other row; so does a NaN key."""
    for side in ("k", "v"):
        case = Case([(40, 40)])
        clean = run("sparse_attention", *case.arguments(), **STATIC)[0]
        slot = int(case.requests.slots(0)[20])
        getattr(case.cache, side)[slot // BLOCK, 0, slot % BLOCK] = math.nan
        out = run("sparse_attention", *case.arguments(), **STATIC)[0]
        assert out[20:, : HEADS // GROUPS].isnan().any(-1).all()
        assert out[20:, HEADS // GROUPS :].isfinite().all()
        assert_same_bits(out[:20], clean[:20])


def test_each_query_head_reads_its_group(run):
    """Values that are the number of their kv head come out as the number of the query head's group."""
    case = Case([(5, 100)])
    case.cache.v[:] = torch.arange(GROUPS)[:, None, None] + 1.0
    out = run("sparse_attention", *case.arguments(), **STATIC)[0]
    expected = (torch.arange(HEADS) // (HEADS // GROUPS) + 1.0)[:, None].expand(5, HEADS, DIM)
    torch.testing.assert_close(out, expected)


def test_chunked_is_whole(run):
    """A prompt at once, and with most of it cached, give the same last rows."""
    case = Case([(96, 96)])
    whole = run("sparse_attention", *case.arguments(), **STATIC)[0]
    for start in (64, 70, 95):
        cu_q = torch.tensor([0, 96 - start], dtype=torch.int32)
        meta = SeqMeta(cu_q, case.meta.seq_lens, case.meta.block_table, 96 - start, 96)
        part = run("sparse_attention", case.q[start:], case.cache, case.ids[start:], meta, **STATIC)[0]
        assert_rows(part, whole[start:], 2e-6)


def test_strided_inputs(run):
    """q from the projection's row, head-major ids seen token-major, int64 ids, one layer of block-outer memory."""
    case = Case(MIXED)
    expected = run("sparse_attention", *case.arguments(), **STATIC)[0]
    row = torch.cat([torch.full((len(case.q), 70), math.nan), case.q.flatten(1)], -1)
    q = row[:, 70:].view(case.q.shape)
    head_major = case.ids.transpose(0, 1).contiguous().transpose(0, 1)
    outer = torch.full((case.cache.buf.shape[0], 3, *case.cache.buf.shape[1:]), math.nan)
    outer[:, 1] = case.cache.buf
    for changed in (
        {"q": q},
        {"block_ids": head_major},
        {"block_ids": case.ids.long()},
        {"kv": PagedCache(outer[:, 1], case.cache.layout)},
    ):
        assert_same_bits(run("sparse_attention", *case.arguments(**changed), **STATIC)[0], expected)


def test_pages_may_lie_anywhere(run):
    """The same tokens in other pages: the same bits."""
    case = Case([(2, 100), (1, 33)])
    expected = run("sparse_attention", *case.arguments(), **STATIC)[0]
    move = torch.randperm(case.requests.pages, generator=generator("sparse/move"))
    moved = torch.empty_like(case.cache.buf)
    moved[move] = case.cache.buf
    table = move[case.meta.block_table.long()].to(torch.int32)
    meta = SeqMeta(case.meta.cu_q, case.meta.seq_lens, table, 2, 100)
    out = run("sparse_attention", case.q, PagedCache(moved, case.cache.layout), case.ids, meta, **STATIC)[0]
    assert_same_bits(out, expected)


@pytest.mark.parametrize("lengths", [[(0, 40)], [], [(2, 0)]])
def test_nothing_to_do(run, lengths):
    """No query tokens, no requests, only padded ones."""
    case = Case(lengths)
    out, lse = run("sparse_attention", *case.arguments(), **STATIC)
    assert out.shape == case.q.shape
    assert not out.any()
    assert lse.eq(-math.inf).all()


@pytest.mark.parametrize(
    ("p_dtype", "least", "most"), [("float32", 0.0, 2e-6), ("bfloat16", 2e-4, 4e-3), ("e4m3x448", 4e-3, 8e-2)]
)
def test_rounded_probabilities_are_emulated(run, p_dtype, least, most):
    """A vendor's P in bf16 or E4M3 costs what it costs, and no more."""
    case = Case([(40, 150)])
    expected = case.by_hand()[0]
    error = worst_row(
        run("sparse_attention", *case.arguments(), **STATIC, traits={"p_dtype": p_dtype})[0], expected
    ).error
    assert least <= error <= most


def test_fp64_is_exact(exact):
    """The oracle of later suites: fp64 in, fp64 through, fp64 out."""
    case = Case(MIXED)
    out, lse = exact("sparse_attention", *case.arguments(), **STATIC)
    expected, expected_lse = case.by_hand()
    assert_rows(out, expected, 1e-13)
    assert_rows(lse[..., None], expected_lse[..., None], 1e-13, floor=1.0)


def test_a_request_does_not_depend_on_its_batch():
    """Each request alone has the rows it has in the batch, padded neighbours or not."""
    case = Case(MIXED)

    def some(chosen):
        part = case.requests.only(chosen)
        rows = torch.cat([torch.arange(len(case.q))[case.requests.rows(request)] for request in chosen])
        out = sparse_attention(case.q[rows], case.cache, case.ids[rows], part.meta, **{**STATIC, "return_lse": False})
        return [out[part.rows(i)] for i in range(len(chosen))]

    assert_row_alone(some, len(MIXED))
