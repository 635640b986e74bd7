"""select_blocks: scores, then the choice, for tokens wherever they stand."""

import pytest
import torch
from m3hal_conformance import assert_row_alone
from m3hal_conformance.inputs import batch, boundary_lengths, generator, index_inputs
from m3hal_conformance.ranks import run_ranks

from m3hal.layouts import KVLayout
from m3hal.ops import SeqMeta, load
from m3hal.ops.kv_write import kv_write
from m3hal.ops.select_blocks import compose, select_blocks

BLOCK, K = 16, 4
STATIC = {"block_size": BLOCK, "top_k_blocks": K, "init_blocks": 0, "local_blocks": 1}


def case(lengths, max_k=0):
    rng = generator(f"select/{lengths}")
    requests = batch(lengths, BLOCK, rng, max_k=max_k)
    q, keys = index_inputs(requests, 2, 32, BLOCK, rng)
    cache = requests.cache(KVLayout("hnd", "float32", BLOCK, 1, 32, False), keys, None, kv_write)
    return requests, q, keys, cache


def by_hand(requests, q, keys):
    """One token and head at a time: score every visible block, force the newest, take the best of the others."""
    ids = torch.full((requests.tokens, 2, K), -1, dtype=torch.int32)
    for request, (queries, length) in enumerate(requests.lengths):
        for i, t in enumerate(range(*requests.rows(request).indices(requests.tokens))):
            position = length - queries + i
            for head in range(2 if length else 0):
                dots = keys[request][: position + 1, 0].double() @ q[t, head].double()
                newest = position // BLOCK
                free = sorted(range(newest), key=lambda b: -float(dots[b * BLOCK : (b + 1) * BLOCK].max()))
                chosen = sorted([*free[: K - 1], newest])
                ids[t, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return ids


def test_a_mixed_batch(run):
    """Decode, prefill, chunks, padded and empty requests, contexts far beyond k blocks; room for more keys."""
    requests, q, keys, cache = case([(1, 150), (100, 100), (5, 143), (0, 20), (3, 0), (1, 1)], max_k=400)
    out = run("select_blocks", q, cache, requests.meta, **STATIC)
    assert torch.equal(out, by_hand(requests, q, keys))
    assert out[requests.rows(4)].eq(-1).all()


@pytest.mark.parametrize("length", boundary_lengths(BLOCK, (K + 1) * BLOCK + 1))
def test_fewer_blocks_than_k(run, length):
    """Up to k visible blocks all are chosen, once; the rest is -1."""
    requests, q, keys, cache = case([(1, length)])
    out = run("select_blocks", q, cache, requests.meta, **STATIC)
    assert torch.equal(out, by_hand(requests, q, keys))
    assert (out >= 0).sum(-1).eq(min(K, -(-length // BLOCK))).all()


def test_chunks_choose_like_the_whole(run):
    """Every token's ids are those of a single prefill, for chunks that end inside blocks."""
    requests, q, _, cache = case([(40 * BLOCK, 40 * BLOCK)])
    whole = run("select_blocks", q, cache, requests.meta, **STATIC)
    for start in range(0, 40 * BLOCK, 90):
        stop = min(start + 90, 40 * BLOCK)
        meta = SeqMeta(
            torch.tensor([0, stop - start], dtype=torch.int32),
            torch.tensor([stop], dtype=torch.int32),
            requests.meta.block_table,
            90,
            40 * BLOCK,
        )
        assert torch.equal(run("select_blocks", q[start:stop], cache, meta, **STATIC), whole[start:stop])


def test_tokens_past_the_last_request(run):
    """Rows that a graph was captured with and no request owns choose nothing."""
    requests, q, _, cache = case([(2, 40)])
    out = run("select_blocks", torch.cat([q, q]), cache, requests.meta, **STATIC)
    assert out[2:].eq(-1).all()
    assert torch.equal(out[:2], run("select_blocks", q, cache, requests.meta, **STATIC))


def test_no_tokens(run):
    """Nothing in, nothing out."""
    requests, q, _, cache = case([])
    assert run("select_blocks", q, cache, requests.meta, **STATIC).shape == (0, 2, K)


def test_the_composition_uses_what_it_is_given():
    """The constituents are the callables of a plan, not our own; they get the tokens' visible blocks."""
    requests, q, _, cache = case([(1, 150), (2, 0), (3, 17)])
    seen = {}

    def scores(*inputs):
        seen["scores"] = inputs
        return "scores"

    def choose(*inputs):
        seen["choose"] = inputs
        return "ids"

    run = compose(block_scores=scores, topk_blocks=choose, merge_topk=None, **STATIC)
    assert run(q, cache, requests.meta) == "ids"
    assert seen["scores"] == (q, cache, requests.meta)
    assert seen["choose"][0] == "scores"
    assert seen["choose"][1].dtype == torch.int32
    assert seen["choose"][1].tolist() == [10, 0, 0, 1, 1, 2]
    assert set(load("select_blocks").covers) == {"block_scores", "topk_blocks", "merge_topk"}


def test_a_request_does_not_depend_on_its_batch():
    """Each request alone chooses what it chooses in the batch."""
    requests, q, _, cache = case([(1, 150), (60, 60), (5, 143), (2, 0)])

    def some(chosen):
        part = requests.only(chosen)
        queries = torch.cat([q[requests.rows(request)] for request in chosen])
        out = select_blocks(queries, cache, part.meta, **STATIC)
        return [out[part.rows(i)] for i in range(len(chosen))]

    assert_row_alone(some, 4)


RANKS = (1, 2, 3, 4, 8)
#: (queries, blocks): the last of ``blocks`` visible blocks is full, just begun, or one key short
COUNTS = [(1, 1), (2, 3), (1, 15), (3, 16), (1, 17), (1, 129)]


def on_ranks(size, q, cache, meta, static):
    return run_ranks(size, lambda group: select_blocks(q, cache, meta, group, **static))


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("forced", [(0, 1), (0, 0), (1, 2)], ids=str)
def test_ranks_choose_what_one_would(size, forced):
    """Bit for bit, on every rank: ragged queries, padded and empty requests, shards without a block."""
    lengths = [(n, BLOCK * blocks - part) for n, blocks in COUNTS for part in (0, 1, BLOCK - 1) if n <= BLOCK]
    lengths = [(min(n, length), length) for n, length in lengths]
    requests, q, _, cache = case([*lengths, (2, 0), (0, 50)])
    static = {**STATIC, "top_k_blocks": 16, "init_blocks": forced[0], "local_blocks": forced[1]}
    one = select_blocks(q, cache, requests.meta, **static)
    for found in on_ranks(size, q, cache, requests.meta, static):
        assert torch.equal(found, one)


@pytest.mark.parametrize("size", [2, 8])
def test_ranks_over_2049_blocks(size):
    """A context of 2,049 blocks, with four scores in all: ties are within ranks and between them."""
    requests, q, keys, _ = case([(1, 2049 * BLOCK), (2, 2048 * BLOCK + 3)])
    keys = [k.abs().gt(0.7).float() * (torch.arange(len(k)) // BLOCK % 4)[:, None, None] for k in keys]
    cache = requests.cache(KVLayout("hnd", "float32", BLOCK, 1, 32, False), keys, None, kv_write)
    q, static = q.abs().gt(0.7).float(), {**STATIC, "top_k_blocks": 16}
    one = select_blocks(q, cache, requests.meta, **static)
    assert all(torch.equal(found, one) for found in on_ranks(size, q, cache, requests.meta, static))


def test_ranks_agree_on_nan():
    """A visible NaN loses on its rank and in the merge."""
    requests, q, keys, _ = case([(2, 40 * BLOCK), (1, 20 * BLOCK)])
    for key in keys:
        key[5 * BLOCK : 11 * BLOCK : 5] = float("nan")
    cache = requests.cache(KVLayout("hnd", "float32", BLOCK, 1, 32, False), keys, None, kv_write)
    one = select_blocks(q, cache, requests.meta, **STATIC)
    assert not torch.isin(one, torch.arange(5, 11)).any()
    for size in RANKS:
        assert all(torch.equal(found, one) for found in on_ranks(size, q, cache, requests.meta, STATIC))


def test_a_rank_reads_its_own_blocks_only():
    """Keys of the others' blocks may hold anything: each rank is given its part and NaN elsewhere."""
    requests, q, keys, cache = case([(3, 25 * BLOCK), (1, 9)])
    one = select_blocks(q, cache, requests.meta, **STATIC)

    def part(group):
        own = [k.clone() for k in keys]
        for k in own:
            k[torch.arange(len(k)) // BLOCK % group.size != group.rank] = float("nan")
        held = requests.cache(KVLayout("hnd", "float32", BLOCK, 1, 32, False), own, None, kv_write)
        return select_blocks(q, held, requests.meta, group, **STATIC)

    assert all(torch.equal(found, one) for found in run_ranks(4, part))


def test_pages_of_half_a_block():
    """A block of several pages is owned whole; a page of several blocks is refused with the remedy."""
    rng = generator("select/pages")
    requests = batch([(2, 300), (1, 77)], BLOCK // 2, rng)
    q, keys = index_inputs(requests, 2, 32, BLOCK, rng)
    cache = requests.cache(KVLayout("hnd", "float32", BLOCK // 2, 1, 32, False), keys, None, kv_write)
    one = select_blocks(q, cache, requests.meta, **STATIC)
    assert all(torch.equal(found, one) for found in on_ranks(3, q, cache, requests.meta, STATIC))
    with pytest.raises(ValueError, match="allocate pages of a block or less"):
        on_ranks(2, q, cache, requests.meta, {**STATIC, "block_size": BLOCK // 4})


def test_nobody_in_the_batch():
    """No request, and none that is so long that every rank owns a block."""
    for lengths in ([], [(1, 3)], [(0, 40)]):
        requests, q, _, cache = case(lengths)
        one = select_blocks(q, cache, requests.meta, **STATIC)
        assert all(torch.equal(found, one) for found in on_ranks(8, q, cache, requests.meta, STATIC))
