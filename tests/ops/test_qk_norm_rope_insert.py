"""qk_norm_rope_insert: four norms, four rotations, two caches, one rounding."""

import math

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows, assert_same_bits, assert_ulp, bits
from m3hal_conformance.inputs import generator, tail_heavy

from m3hal.layouts import KVLayout
from m3hal.ops import QKNorms, load
from m3hal.ops.kv_write import kv_write
from m3hal.ops.qk_norm_rope_insert import compose, qk_norm_rope_insert
from m3hal.ops.rms_norm import rms_norm
from m3hal.ops.rope_partial import rope_partial, rope_table

PAGE = 16
TABLE = rope_table(1024, 64, 5e6)
SPARSE = {
    "num_q_heads": 8,
    "num_kv_heads": 2,
    "num_index_heads": 2,
    "head_dim": 128,
    "index_dim": 128,
    "rotary_dim": 64,
    "eps": 1e-6,
    "weight_offset": 1.0,
}
DENSE = {**SPARSE, "num_index_heads": 0}


class Case:
    """Rows of the projection whose heads differ in size, and caches full of NaN."""

    def __init__(self, tokens, statics=SPARSE, *, dtype=torch.float32, kind="hnd"):
        rng = generator(f"insert/{tokens}/{statics['num_index_heads']}")
        heads = statics["num_q_heads"] + 2 * statics["num_kv_heads"]
        index_heads = statics["num_index_heads"] + 1 if statics["num_index_heads"] else 0
        row = tail_heavy(tokens, heads + index_heads, 128, rng=rng) * (1.0 + torch.arange(heads + index_heads)[:, None])
        self.qkv = row.flatten(1).to(dtype)
        weights = [(0.2 * torch.randn(128, generator=rng)).to(dtype) for _ in range(4)]
        self.norms = QKNorms(*weights) if index_heads else QKNorms(*weights[:2])
        self.positions = torch.randint(1024, (tokens,), generator=rng)
        self.slots = torch.randperm(4 * PAGE, generator=rng)[:tokens]
        self.index_slots = torch.randperm(4 * PAGE, generator=rng)[:tokens] if index_heads else None
        format = str(dtype).removeprefix("torch.")
        self.kv = self.poisoned(KVLayout(kind, format, PAGE, statics["num_kv_heads"], 128, True))
        self.index = self.poisoned(KVLayout(kind, format, PAGE, 1, 128, False)) if index_heads else None

    @staticmethod
    def poisoned(layout):
        cache = layout.empty(4)
        cache.buf.fill_(math.nan)
        return cache

    def arguments(self):
        place = (self.positions, TABLE, self.kv, self.index, self.slots, self.index_slots)
        return (self.qkv, self.norms, *place)

    def by_hand(self, dtype=torch.float64):
        """q, k, v, index_q, index_k from the formulas, in fp64."""
        heads = self.qkv.to(dtype).unflatten(-1, (-1, 128))
        counts = (8, 2, 2, 2, 1) if self.index else (8, 2, 2)
        parts = list(torch.split(heads, counts, dim=1))
        weights = [self.norms.q, self.norms.k, None, self.norms.index_q, self.norms.index_k]
        turn = torch.complex(TABLE[self.positions, :32].to(dtype), TABLE[self.positions, 32:].to(dtype))[:, None]
        for i, weight in enumerate(weights[: len(parts)]):
            if weight is not None:
                x = parts[i]
                x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1.0 + weight.to(dtype))
                pair = torch.complex(x[..., :32].contiguous(), x[..., 32:64].contiguous()) * turn
                parts[i] = torch.cat([pair.real, pair.imag, x[..., 64:]], -1)
        return parts


def pair_size(x):
    """Magnitude of each element's pair, which the rotation keeps."""
    size = torch.hypot(x[..., :32], x[..., 32:64])
    return torch.cat([size, size, x[..., 64:].abs()], -1)


def at(view, slots):
    """The cache's rows at the given slots: [T, heads, D]."""
    return view[slots // PAGE, :, slots % PAGE]


@pytest.mark.parametrize("kind", ["hnd", "nhd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_against_the_formulas(run, dtype, tokens, kind):
    """Rounded once: within a unit of the pair; values bit for bit; every other byte of the caches as it was."""
    case = Case(tokens, dtype=dtype, kind=kind)
    (q, index_q), caches = run("qk_norm_rope_insert", *case.arguments(), **SPARSE)
    expected = case.by_hand()
    kv, index = caches["kv"], caches["index_cache"]
    for mine, theirs in (
        (q, expected[0]),
        (at(kv.k, case.slots), expected[1]),
        (index_q, expected[3]),
        (at(index.k, case.index_slots), expected[4]),
    ):
        if dtype == torch.bfloat16:
            assert_ulp(mine, theirs, 0.51, scale=pair_size(theirs))
        else:
            assert_rows(mine, theirs, 1e-6)
    assert_same_bits(at(kv.v, case.slots), case.qkv[:, 10 * 128 : 12 * 128].view(-1, 2, 128))
    assert int((~kv.buf.isnan()).sum()) == tokens * 2 * 256
    assert int((~index.buf.isnan()).sum()) == tokens * 128


def test_dense_layers_have_no_indexer(run):
    """num_index_heads 0: no index query, no index cache."""
    case = Case(5, DENSE)
    (q, index_q), caches = run("qk_norm_rope_insert", *case.arguments(), **DENSE)
    expected = case.by_hand()
    assert index_q is None
    assert_rows(q, expected[0], 1e-6)
    assert_rows(at(caches["kv"].k, case.slots), expected[1], 1e-6)


def test_padded_tokens_are_not_stored(run):
    """slot -1 leaves the cache as it is and still makes q; the two caches' slots are separate."""
    case = Case(4)
    case.slots[1] = case.index_slots[2] = -1
    (q, index_q), caches = run("qk_norm_rope_insert", *case.arguments(), **SPARSE)
    expected = case.by_hand()
    assert_rows(q, expected[0], 1e-6)
    assert_rows(index_q, expected[3], 1e-6)
    assert int((~caches["kv"].buf.isnan()).sum()) == 3 * 2 * 256
    assert int((~caches["index_cache"].buf.isnan()).sum()) == 3 * 128
    assert_rows(at(caches["index_cache"].k, case.index_slots)[[0, 1, 3]], expected[4][[0, 1, 3]], 1e-6)


def test_no_tokens(run):
    """Nothing in, nothing written."""
    case = Case(0)
    (q, index_q), caches = run("qk_norm_rope_insert", *case.arguments(), **SPARSE)
    assert q.shape == (0, 8, 128)
    assert index_q.shape == (0, 2, 128)
    assert caches["kv"].buf.isnan().all()


def test_a_slice_of_a_wider_row(run):
    """The projection's output may be part of a larger tensor."""
    case = Case(5)
    plain, caches = run("qk_norm_rope_insert", *case.arguments(), **SPARSE)
    case.qkv = torch.cat([torch.full((5, 33), math.nan), case.qkv], -1)[:, 33:]
    strided, strided_caches = run("qk_norm_rope_insert", *case.arguments(), **SPARSE)
    assert torch.equal(plain[0], strided[0])
    assert torch.equal(bits(caches["kv"].buf), bits(strided_caches["kv"].buf))


def test_each_head_is_its_own(run):
    """A head ten times as large, and a NaN in one, change no other head; each is what it is alone."""
    case = Case(3)
    clean = run("qk_norm_rope_insert", *case.arguments(), **SPARSE)[0][0]
    case.qkv[:, 128:256] *= 10
    case.qkv[0, 3 * 128] = math.nan
    q = run("qk_norm_rope_insert", *case.arguments(), **SPARSE)[0][0]
    others = [0, 2, 4, 5, 6, 7]
    assert_same_bits(q[:, others].contiguous(), clean[:, others].contiguous())
    assert_rows(q[:, 1], clean[:, 1], 1e-5)
    assert q[0, 3].isnan().all()
    for head in others:
        alone = rms_norm(case.qkv[:, None, head * 128 : (head + 1) * 128], case.norms.q, eps=1e-6, weight_offset=1.0)
        alone = rope_partial(alone, case.positions, TABLE, rotary_dim=64)
        assert_rows(q[:, head : head + 1], alone, 1e-6)


def test_rounding_after_the_norm_is_emulated(run):
    """What a composition of bf16 operators gives: a third of the rotated numbers differ, none by much."""
    case = Case(33, dtype=torch.bfloat16)
    once = run("qk_norm_rope_insert", *case.arguments(), **SPARSE)[0][0]
    twice = run("qk_norm_rope_insert", *case.arguments(), **SPARSE, traits={"norm_rope_round": "bfloat16"})[0][0]
    normed = rms_norm(case.qkv[:, : 8 * 128].view(-1, 8, 128), case.norms.q, eps=1e-6, weight_offset=1.0)
    assert_same_bits(twice, rope_partial(normed, case.positions, TABLE, rotary_dim=64))
    assert 0.1 < (once != twice)[..., :64].float().mean() < 0.5
    assert torch.equal(once[..., 64:], twice[..., 64:])
    assert_rows(twice, once, 5e-3)


def test_a_bf16_table_is_emulated(run):
    """The trait reaches the rotation."""
    case = Case(9)
    rounded = run("qk_norm_rope_insert", *case.arguments(), **SPARSE, traits={"rope_table": "bfloat16"})[0][0]
    exact = run("qk_norm_rope_insert", *case.arguments(), **SPARSE)[0][0]
    assert not torch.equal(rounded[..., :64], exact[..., :64])
    assert torch.equal(rounded[..., 64:], exact[..., 64:])


def test_the_composition_uses_what_it_is_given():
    """The constituents are the callables of a plan; each gets the heads and the weight of its kind."""
    case, calls = Case(3), []

    def norm(x, weight):
        calls.append(("norm", x.shape[1], weight is case.norms.k))
        return x

    def rope(x, positions, table):
        calls.append(("rope", x.shape[1], positions is case.positions and table is TABLE))
        return x

    def write(cache, k, v, slots):
        calls.append(("write", k.shape[1], v is None))
        kv_write(cache, k, v, slots)

    run = compose(rms_norm=norm, rope_partial=rope, kv_write=write, **SPARSE)
    q, index_q = run(*case.arguments())
    assert torch.equal(q.flatten(1), case.qkv[:, : 8 * 128])
    assert torch.equal(index_q.flatten(1), case.qkv[:, 12 * 128 : 14 * 128])
    assert sorted(calls) == [
        ("norm", 1, False),
        ("norm", 2, False),
        ("norm", 2, True),
        ("norm", 8, False),
        ("rope", 1, True),
        ("rope", 2, True),
        ("rope", 2, True),
        ("rope", 8, True),
        ("write", 1, True),
        ("write", 2, False),
    ]
    assert set(load("qk_norm_rope_insert").covers) == {"rms_norm", "rope_partial", "kv_write"}


def test_a_row_does_not_depend_on_its_batch():
    """A token's q is the same bits alone and among others."""
    case = Case(9)

    def some(rows):
        rows = list(rows)
        place = (case.kv, case.index, case.slots[rows], case.index_slots[rows])
        return qk_norm_rope_insert(case.qkv[rows], case.norms, case.positions[rows], TABLE, *place, **SPARSE)[0]

    assert_row_alone(some, 9)
