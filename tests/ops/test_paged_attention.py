"""paged_attention: causal or not, in a window or not, over exactly the keys of the request."""

import math

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows, assert_same_bits, worst_row
from m3hal_conformance.inputs import attention_inputs, batch, boundary_lengths, generator

from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import SeqMeta
from m3hal.ops.kv_write import kv_write
from m3hal.ops.paged_attention import paged_attention

PAGE, DIM, HEADS, GROUPS = 16, 64, 8, 2
DENSE = {"scale": DIM**-0.5, "causal": True, "window_left": -1, "return_lse": True}


class Case:
    """A batch and its data."""

    def __init__(self, lengths, *, format="float32", kind="hnd"):
        rng = generator(f"paged/{lengths}")
        self.requests = batch(lengths, PAGE, rng)
        self.meta = self.requests.meta
        self.data = attention_inputs(self.requests, HEADS, GROUPS, DIM, PAGE, rng)
        self.q = self.data.q.to(getattr(torch, format))
        layout = KVLayout(kind, format, PAGE, GROUPS, DIM, True)
        self.cache = self.requests.cache(layout, self.data.keys, self.data.values, kv_write)

    def by_hand(self, *, causal=True, window_left=-1):
        """One token and head at a time over an explicit list of keys, in fp64: out and lse."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        lse = torch.full(self.q.shape[:2], -math.inf, dtype=torch.float64)
        for request, (queries, length) in enumerate(self.requests.lengths):
            for i, t in enumerate(range(*self.requests.rows(request).indices(len(self.q)))):
                position = length - queries + i
                keys = [s for s in range(length) if not causal or s <= position]
                keys = [s for s in keys if window_left < 0 or s >= position - window_left]
                for head in range(HEADS if keys else 0):
                    group = head // (HEADS // GROUPS)
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
    case = Case(MIXED, format=format, kind=kind)
    out, lse = run("paged_attention", case.q, case.cache, case.meta, **DENSE)
    expected, expected_lse = case.by_hand()
    assert_rows(out, expected, bound)
    assert_rows(lse[..., None], expected_lse[..., None], 2e-6, floor=1.0)
    assert not out[case.requests.rows(4)].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 40, 1000])
def test_windows(run, causal, window_left):
    """A block of 8 in a window, shorter than the context and longer; window 0 and causal: itself alone."""
    case = Case([(8, 60), (8, 8), (1, 33)])
    static = {**DENSE, "causal": causal, "window_left": window_left}
    out, lse = run("paged_attention", case.q, case.cache, case.meta, **static)
    expected, expected_lse = case.by_hand(causal=causal, window_left=window_left)
    assert_rows(out, expected, 2e-6)
    assert_rows(lse[..., None], expected_lse[..., None], 2e-6, floor=1.0)
    if causal and window_left == 0:
        torch.testing.assert_close(out[7].view(GROUPS, -1, DIM)[:, 0], case.data.values[0][59])


def test_not_causal_sees_the_whole_block(run):
    """Without the mask every query of a block sees all keys, and that is another function."""
    case = Case([(8, 60)])
    out = run("paged_attention", case.q, case.cache, case.meta, **{**DENSE, "causal": False})[0]
    assert_rows(out, case.by_hand(causal=False)[0], 2e-6)
    assert worst_row(out, case.by_hand()[0]).error > 0.05


@pytest.mark.parametrize("length", boundary_lengths(PAGE, 3 * PAGE + 1))
def test_lengths_at_page_boundaries(run, length):
    """Next to every boundary."""
    case = Case([(min(3, length), length)])
    assert_rows(run("paged_attention", case.q, case.cache, case.meta, **DENSE)[0], case.by_hand()[0], 2e-6)


@pytest.mark.parametrize("stale", [math.nan, 1e4, 0.0])
def test_leftovers_past_the_end(run, stale):
    """Also without the causal mask nothing past the end of the request is read."""
    case = Case([(4, 37)])
    static = {**DENSE, "causal": False}
    clean = run("paged_attention", case.q, case.cache, case.meta, **static)[0]
    case.cache.buf[int(case.meta.block_table[0, 2]), :, 5:] = stale
    assert_same_bits(run("paged_attention", case.q, case.cache, case.meta, **static)[0], clean)


def test_a_prefix_hit_is_the_whole(run):
    """384 tokens at once, 256 cached + 128, and 383 + 1: the same last rows."""
    case = Case([(384, 384)])
    whole = run("paged_attention", case.q, case.cache, case.meta, **DENSE)[0]
    for start in (256, 383):
        cu_q = torch.tensor([0, 384 - start], dtype=torch.int32)
        meta = SeqMeta(cu_q, case.meta.seq_lens, case.meta.block_table, 384 - start, 384)
        part = run("paged_attention", case.q[start:], case.cache, meta, **DENSE)[0]
        assert_rows(part, whole[start:], 2e-6)


def test_a_visible_nan_is_seen_and_a_future_one_is_not(run):
    """A NaN of the chunk's own tokens reaches later rows only."""
    case = Case([(40, 40)])
    clean = run("paged_attention", case.q, case.cache, case.meta, **DENSE)[0]
    slot = int(case.requests.slots(0)[20])
    case.cache.v[slot // PAGE, 0, slot % PAGE, 3] = math.nan
    out = run("paged_attention", case.q, case.cache, case.meta, **DENSE)[0]
    assert out[20:, : HEADS // GROUPS, 3].isnan().all()
    assert out.isnan().sum() == 20 * HEADS // GROUPS
    assert_rows(out[:20], clean[:20], 1e-6)


def test_huge_scores_do_not_overflow(run):
    """Scores of a thousand: softmax of the differences, and a finite lse."""
    case = Case([(3, 40)])
    out, lse = run("paged_attention", case.q * 1e3, case.cache, case.meta, **DENSE)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert lse.max() > 100


def test_strided_inputs(run):
    """q from the projection's row; one layer of block-outer memory."""
    case = Case(MIXED)
    expected = run("paged_attention", case.q, case.cache, case.meta, **DENSE)[0]
    row = torch.cat([torch.full((len(case.q), 70), math.nan), case.q.flatten(1)], -1)
    outer = torch.full((case.cache.buf.shape[0], 3, *case.cache.buf.shape[1:]), math.nan)
    outer[:, 1] = case.cache.buf
    kv = PagedCache(outer[:, 1], case.cache.layout)
    out = run("paged_attention", row[:, 70:].view(case.q.shape), kv, case.meta, **DENSE)[0]
    assert_same_bits(out, expected)


@pytest.mark.parametrize("lengths", [[(0, 40)], [], [(2, 0)]])
def test_nothing_to_do(run, lengths):
    """No query tokens, no requests, only padded ones."""
    case = Case(lengths)
    out, lse = run("paged_attention", case.q, case.cache, case.meta, **DENSE)
    assert out.shape == case.q.shape
    assert not out.any()
    assert lse.eq(-math.inf).all()


@pytest.mark.parametrize(("p_dtype", "least", "most"), [("bfloat16", 2e-4, 4e-3), ("e4m3x448", 4e-3, 8e-2)])
def test_rounded_probabilities_are_emulated(run, p_dtype, least, most):
    """A vendor's P in bf16 or E4M3 costs what it costs, and no more."""
    case = Case([(20, 150)])
    out = run("paged_attention", case.q, case.cache, case.meta, **DENSE, traits={"p_dtype": p_dtype})[0]
    assert least <= worst_row(out, case.by_hand()[0]).error <= most


def test_a_request_does_not_depend_on_its_batch():
    """Each request alone has the rows it has in the batch."""
    case = Case(MIXED)

    def some(chosen):
        part = case.requests.only(chosen)
        rows = torch.cat([torch.arange(len(case.q))[case.requests.rows(request)] for request in chosen])
        out = paged_attention(case.q[rows], case.cache, part.meta, **{**DENSE, "return_lse": False})
        return [out[part.rows(i)] for i in range(len(chosen))]

    assert_row_alone(some, len(MIXED))
