"""block_scores: the best visible key of each block; what is not visible, or not there, does not exist."""

import math

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows, assert_same_bits
from m3hal_conformance.inputs import batch, boundary_lengths, generator, index_inputs

from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import SeqMeta
from m3hal.ops.block_scores import block_scores
from m3hal.ops.kv_write import kv_write

BLOCK = 16


def layout(dim=32, page=BLOCK, format="float32", kind="hnd"):
    return KVLayout(kind, format, page, 1, dim, False)


def case(lengths, *, heads=2, dim=32, page=BLOCK, max_k=0, format="float32", kind="hnd"):
    rng = generator(f"block_scores/{lengths}")
    requests = batch(lengths, page, rng, max_k=max_k)
    q, keys = index_inputs(requests, heads, dim, BLOCK, rng)
    return requests, q, keys, requests.cache(layout(dim, page, format, kind), keys, None, kv_write)


def by_hand(requests, q, keys):
    """One query, head and block at a time, in fp64."""
    blocks = -(-requests.meta.max_k // BLOCK)
    out = torch.full((requests.tokens, q.shape[1], blocks), -math.inf, dtype=torch.float64)
    for request, (queries, length) in enumerate(requests.lengths):
        for i, t in enumerate(range(*requests.rows(request).indices(requests.tokens))):
            position = length - queries + i
            for block in range(0 if length == 0 else position // BLOCK + 1):
                visible = keys[request][block * BLOCK : min((block + 1) * BLOCK, position + 1), 0]
                out[t, :, block] = (q[t].double() @ visible.double().T).amax(-1)
    return out


@pytest.mark.parametrize("length", boundary_lengths(BLOCK, 4 * BLOCK + 1))
@pytest.mark.parametrize("queries", [1, 4])
def test_lengths_at_block_boundaries(run, length, queries):
    """Every length next to a boundary, in decode and in a chunk, among pages full of NaN."""
    requests, q, keys, cache = case([(min(queries, length), length)])
    out = run("block_scores", q, cache, requests.meta, block_size=BLOCK)
    assert_rows(out, by_hand(requests, q, keys), 1e-6)


def test_a_mixed_batch(run):
    """Decode, whole prefill, a chunk that starts inside a block, empty and padded requests; room for more keys."""
    lengths = [(1, 70), (37, 37), (5, 43), (0, 20), (3, 0), (1, 1), (0, 0)]
    requests, q, keys, cache = case(lengths, max_k=200)
    out = run("block_scores", q, cache, requests.meta, block_size=BLOCK)
    assert out.shape == (47, 2, 13)
    assert_rows(out, by_hand(requests, q, keys), 1e-6)
    assert out[requests.rows(4)].eq(-math.inf).all()


@pytest.mark.parametrize("page", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", ["hnd", "nhd"])
def test_pages_are_not_blocks(run, page, kind):
    """A page size other than the block size changes where keys lie, not what the blocks are."""
    requests, q, keys, cache = case([(6, 90), (1, 33)], page=page, kind=kind)
    assert_rows(run("block_scores", q, cache, requests.meta, block_size=BLOCK), by_hand(requests, q, keys), 1e-6)


def test_bf16(run):
    """bf16 queries and keys, fp32 products and scores."""
    requests, q, keys, cache = case([(3, 100)], format="bfloat16")
    out = run("block_scores", q.bfloat16(), cache, requests.meta, block_size=BLOCK)
    assert out.dtype == torch.float32
    assert_rows(out, by_hand(requests, q, keys), 1e-6)  # the inputs are bf16 numbers


def test_negative_scores(run):
    """The best of negative numbers is not zero: a maximum that starts at 0 would lose the least bad block."""
    requests = batch([(1, 20 * BLOCK)], BLOCK, generator("negative"))
    rng = generator("negative/keys")
    key = 0.5 + torch.rand(20 * BLOCK, 1, 32, generator=rng)
    key[3 * BLOCK : 4 * BLOCK] *= 0.1
    cache = requests.cache(layout(), [key], None, kv_write)
    out = run("block_scores", torch.full((1, 2, 32), -1 / 32), cache, requests.meta, block_size=BLOCK)
    assert out.lt(0).all()
    assert out.argmax(-1).eq(3).all()


def test_leftovers_past_the_end(run):
    """Published numbers: keys of an evicted request in the last page, 1e4 each, do not win."""
    length, span = 16 * 128 + 5, 2176
    requests = batch([(1, length)], 128, generator("leftovers"))
    unit = torch.zeros(span, 1, 32)
    unit[:, 0, 0] = torch.arange(span) / span
    cache = requests.cache(layout(page=128), [unit[:length]], None, kv_write)
    last = int(requests.meta.block_table[0, 16])
    cache.k[last, :, 5:] = 1e4
    query = torch.zeros(1, 1, 32)
    query[..., 0] = 1.0
    out = run("block_scores", query, cache, requests.meta, block_size=128)
    assert out[0, 0, 16] == pytest.approx(2052 / 2176)
    assert out[0, 0, 0] == pytest.approx(127 / 2176)


def test_a_visible_nan_is_its_blocks(run):
    """A NaN key makes the score of its block NaN for those who see it, and nothing else."""
    requests, q, _, cache = case([(40, 40)])
    clean = run("block_scores", q, cache, requests.meta, block_size=BLOCK)
    slot = int(requests.slots(0)[20])
    cache.k[slot // BLOCK, 0, slot % BLOCK] = math.nan
    out = run("block_scores", q, cache, requests.meta, block_size=BLOCK)
    assert out[20:, :, 1].isnan().all()
    assert_same_bits(out[:20], clean[:20])
    assert_same_bits(out[20:, :, [0, 2]], clean[20:, :, [0, 2]])


def test_chunks_are_the_whole(run):
    """A context prefilled in chunks has, token by token, the scores of the whole."""
    requests, q, _, cache = case([(100, 100)])
    whole = run("block_scores", q, cache, requests.meta, block_size=BLOCK)
    for start, stop in ((0, 13), (13, 64), (64, 65), (65, 100)):
        meta = SeqMeta(
            torch.tensor([0, stop - start], dtype=torch.int32),
            torch.tensor([stop], dtype=torch.int32),
            requests.meta.block_table,
            stop - start,
            100,
        )
        assert_rows(run("block_scores", q[start:stop], cache, meta, block_size=BLOCK), whole[start:stop], 1e-6)


def test_shared_pages(run):
    """Two requests with one prefix read the same pages."""
    requests, q, _, cache = case([(1, 64), (1, 64)])
    table = requests.meta.block_table.clone()
    table[1, :4] = table[0, :4]
    meta = SeqMeta(requests.meta.cu_q, requests.meta.seq_lens, table, 1, 64)
    q[1] = q[0]
    out = run("block_scores", q, cache, meta, block_size=BLOCK)
    assert torch.equal(out[0], out[1])


def test_strided_inputs(run):
    """Queries cut out of the projection's row; one layer of block-outer memory; int64 tables."""
    requests, q, keys, cache = case([(2, 50), (1, 17)])
    wide = torch.cat([torch.full((3, 1, 32), math.nan), q], 1)[:, 1:]
    outer = torch.full((cache.buf.shape[0], 3, *cache.buf.shape[1:]), math.nan)
    outer[:, 1] = cache.buf
    meta = SeqMeta(requests.meta.cu_q, requests.meta.seq_lens, requests.meta.block_table.long(), 2, 50)
    out = run("block_scores", wide, PagedCache(outer[:, 1], cache.layout), meta, block_size=BLOCK)
    assert_rows(out, by_hand(requests, q, keys), 1e-6)


def test_no_tokens(run):
    """No query tokens give no rows, with or without requests."""
    requests, q, _, cache = case([(0, 40)])
    assert run("block_scores", q, cache, requests.meta, block_size=BLOCK).shape == (0, 2, 3)
    requests, q, _, cache = case([])
    assert run("block_scores", q, cache, requests.meta, block_size=BLOCK).shape == (0, 2, 0)


def test_a_stale_bound_is_an_error():
    """Scores are sized by the host's max_k; a longer request is refused, not written past the end."""
    requests, q, _, cache = case([(1, 40)])
    meta = SeqMeta(requests.meta.cu_q, requests.meta.seq_lens, requests.meta.block_table, 1, 32)
    with pytest.raises(ValueError, match=r"40 tokens but meta\.max_k is 32"):
        block_scores(q, cache, meta, block_size=BLOCK)


def test_a_request_does_not_depend_on_its_batch():
    """Each request's scores are those it has alone."""
    requests, q, _, cache = case([(1, 70), (37, 37), (5, 43), (2, 0)])

    def some(chosen):
        part = requests.only(chosen)
        queries = torch.cat([q[requests.rows(request)] for request in chosen])
        out = block_scores(queries, cache, part.meta, block_size=BLOCK)
        return [out[part.rows(i)] for i in range(len(chosen))]

    assert_row_alone(some, 4)
