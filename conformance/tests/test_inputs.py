"""Structured inputs are reproducible, and structured: on them a fault is a large error, where random data hides it."""

import torch
from m3hal_conformance import worst_row
from m3hal_conformance.inputs import (
    attention_inputs,
    batch,
    boundary_lengths,
    generator,
    hot_routing,
    index_inputs,
    seed,
    tail_heavy,
)

from m3hal.layouts import KVLayout
from m3hal.ops import load


def naive_attention(q, k, v, keys):
    """q [Hq, D] against the keys [S, Hkv, D] at the given positions, in fp64."""
    share = q.shape[0] // k.shape[1]
    k, v = (side[keys].double().repeat_interleave(share, 1) for side in (k, v))
    weights = torch.softmax(torch.einsum("hd,shd->hs", q.double(), k) * q.shape[-1] ** -0.5, -1)
    return torch.einsum("hs,shd->hd", weights, v)


def test_a_case_is_its_name():
    """The same name gives the same numbers in every process; another name gives others."""
    assert seed("sparse/8") == 33744838976943970
    assert torch.equal(torch.randn(4, generator=generator("a")), torch.randn(4, generator=generator("a")))
    assert not torch.equal(torch.randn(4, generator=generator("a")), torch.randn(4, generator=generator("b")))


def test_boundary_lengths():
    """One token, and every page boundary with its neighbours."""
    assert boundary_lengths(128, 257) == [1, 127, 128, 129, 255, 256, 257]


def test_energy_sits_in_the_tail():
    """The last eighth of a row holds about two thirds of its energy."""
    x = tail_heavy(100, 512, rng=generator("tail"))
    share = x[:, -64:].square().sum() / x.square().sum()
    assert 0.6 < share < 0.73


def test_a_lost_block_or_tail_is_a_large_error():
    """At 2,048 keys, where random data hides it: each of the 16 blocks, and the last key alone, counts 1 % or more."""
    rng = generator("attention")
    requests = batch([(3, 2048)], 128, rng)
    data = attention_inputs(requests, 4, 2, 128, 128, rng)
    k, v = data.keys[0], data.values[0]
    everything = torch.arange(2048)
    for q in data.q:
        whole = naive_attention(q, k, v, everything)
        lost = [naive_attention(q, k, v, everything[everything // 128 != block]) for block in range(16)]
        lost.append(naive_attention(q, k, v, everything[:-1]))
        for less in lost:
            assert worst_row(less, whole).error > 0.01
        assert worst_row(whole.flip(0), whole).error > 0.1  # the other kv head


def test_needles_decide_the_block_scores():
    """The best key of a block is its needle, and dropping the last key of a block changes the ranking."""
    rng = generator("index")
    requests = batch([(2, 1000)], 128, rng)
    q, (keys,) = index_inputs(requests, 2, 64, 128, rng)
    dots = torch.einsum("thd,sd->ths", q, keys[:, 0])
    scores = torch.nn.functional.pad(dots, (0, 24), value=-torch.inf).unflatten(-1, (8, 128)).amax(-1)
    without_last = dots.clone()
    without_last[..., 127::128] = -torch.inf
    without_last[..., -1] = -torch.inf
    cut = torch.nn.functional.pad(without_last, (0, 24), value=-torch.inf).unflatten(-1, (8, 128)).amax(-1)
    assert not torch.equal(cut.argsort(-1), scores.argsort(-1))


def test_batch_pages_are_disjoint_and_framed():
    """No two requests share a page; page 0 is nobody's and stands before and after every row of the table."""
    requests = batch([(5, 300), (4, 0), (0, 128), (1, 129)], 128, generator("pages"))
    meta = requests.meta
    assert meta.cu_q.tolist() == [0, 5, 9, 9, 10]
    assert meta.seq_lens.tolist() == [300, 0, 128, 129]
    used = [meta.block_table[row, : -(-length // 128)].tolist() for row, (_, length) in enumerate(requests.lengths)]
    flat = [page for row in used for page in row]
    assert sorted(flat) == [1, 2, 3, 4, 5, 6]
    assert all((meta.block_table[row, len(pages) :] == 0).all() for row, pages in enumerate(used))
    before = meta.block_table.as_strided((4,), (meta.block_table.stride(0),), meta.block_table.storage_offset() - 1)
    assert (before == 0).all()
    assert requests.query_slots()[5:9].tolist() == [-1] * 4
    assert torch.equal(requests.query_slots()[:5], requests.slots(0)[-5:])
    assert requests.rows(3) == slice(9, 10)


def test_a_cache_holds_nan_but_for_its_tokens():
    """Pages of nobody and the tail of the last page are poison."""
    rng = generator("cache")
    requests = batch([(1, 5), (1, 4)], 4, rng)
    layout = KVLayout("nhd", "bfloat16", 4, 2, 8, True)
    keys = [torch.ones(5, 2, 8), torch.ones(4, 2, 8)]
    cache = requests.cache(layout, keys, keys, load("kv_write").reference)
    assert int(cache.buf.isfinite().sum()) == 9 * 2 * 16
    assert cache.k[0].isnan().all()


def test_fewer_requests_keep_their_pages():
    """A request alone reads the same memory as in the batch."""
    requests = batch([(2, 10), (1, 9), (3, 3)], 4, generator("only"))
    alone = requests.only([1])
    assert torch.equal(alone.slots(0), requests.slots(1))
    assert alone.meta.cu_q.tolist() == [0, 1]
    assert alone.meta.max_k == requests.meta.max_k


def test_hot_routing():
    """One expert in every row, one in none, no row with an expert twice, weights that sum to the routed scale."""
    weights, ids = hot_routing(50, 8, 4, generator("hot"))
    assert (ids == 1).any(-1).all()
    assert not (ids == 7).any()
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.allclose(weights.sum(-1), torch.tensor(2.0))
    assert len({row.index(1) for row in ids.tolist()}) == 4
