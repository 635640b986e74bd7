"""qkv_norm_rope_insert: a projection whose accumulators go on unrounded, and what follows it."""

import math

import pytest
import torch
from m3hal_conformance import assert_rows
from m3hal_conformance.inputs import generator

from m3hal import formats
from m3hal.formats import spec_of
from m3hal.layouts import KVLayout
from m3hal.ops import QKNorms, load
from m3hal.ops.qk_norm_rope_insert import qk_norm_rope_insert
from m3hal.ops.qkv_norm_rope_insert import compose, qkv_norm_rope_insert
from m3hal.ops.rope_partial import rope_table

PAGE, HIDDEN = 16, 96
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


def inputs(tokens, statics=SPARSE, dtype=torch.bfloat16, kind="hnd"):
    """Everything but x and the weight is that of the insertion; caches start as NaN."""
    index = statics["num_index_heads"] > 0
    rng = generator(f"qkv/{tokens}/{index}")
    rows = (8 + 2 * 2 + (3 if index else 0)) * 128

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=rng)).to(dtype)

    def poisoned(heads, has_values):
        format = str(dtype).removeprefix("torch.")
        cache = KVLayout(kind, format, PAGE, heads, 128, has_values).empty(4)
        cache.buf.fill_(math.nan)
        return cache

    slots = torch.randperm(4 * PAGE, generator=rng)[:tokens]
    return (
        draw(tokens, HIDDEN),
        draw(rows, HIDDEN, scale=HIDDEN**-0.5),
        QKNorms(*(draw(128, scale=0.2) for _ in range(4 if index else 2))),
        torch.randint(1024, (tokens,), generator=rng),
        TABLE,
        poisoned(2, True),
        poisoned(1, False) if index else None,
        slots,
        slots.flip(0) if index else None,
    )


def found(operator, given, **statics):
    """q, index_q and the caches' numbers, of a call on caches of its own."""
    made = list(given)
    for at in (5, 6):
        made[at] = made[at] and type(made[at])(made[at].buf.clone(), made[at].layout)
    q, index_q = operator(*made, **statics)
    return [tensor for tensor in (q, index_q, made[5].buf, made[6] and made[6].buf) if tensor is not None]


@pytest.mark.parametrize("statics", [SPARSE, DENSE], ids=["sparse", "dense"])
@pytest.mark.parametrize("kind", ["hnd", "nhd"])
def test_the_row_is_not_rounded(statics, kind):
    """In bf16 it is the insertion of the fp32 product, rounded once; the composition's rows are rounded before."""
    given = inputs(7, statics, kind=kind)
    x, weight, *_rest = given

    def wide(rows):
        return lambda *_, **statics: qk_norm_rope_insert(rows, *_[2:], **statics)

    exact = found(wide(x.float() @ weight.float().T), given, **statics)
    mine = found(qkv_norm_rope_insert, given, **statics)
    assert all(torch.equal(a.nan_to_num(), b.to(a.dtype).nan_to_num()) for a, b in zip(mine, exact, strict=True))
    rounded = found(wide(x @ weight.T), given, **statics)
    assert any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine, rounded, strict=True))


def test_rounded_rows_are_the_composition():
    """With ``qkv_round`` the definition gives the bits of linear followed by the insertion."""
    given = inputs(9)
    linear = load("linear").reference
    run = compose(linear=linear, qk_norm_rope_insert=lambda *i: qk_norm_rope_insert(*i, **SPARSE))
    theirs = found(run, given)
    mine = found(qkv_norm_rope_insert, given, **SPARSE, traits={"qkv_round": "bfloat16"})
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine, theirs, strict=True))


def test_in_fp32_it_is_the_composition():
    """Where nothing is rounded the two are the same, bit for bit."""
    given = inputs(5, dtype=torch.float32)
    run = compose(linear=load("linear").reference, qk_norm_rope_insert=lambda *i: qk_norm_rope_insert(*i, **SPARSE))
    mine, theirs = found(qkv_norm_rope_insert, given, **SPARSE), found(run, given)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8", "mxfp4", "nvfp4"])
def test_stored_weights(format):
    """A stored weight enters with the numbers that it stands for."""
    given = inputs(5, dtype=torch.float32)
    stored = formats.quantize(given[1], spec_of(format))
    numbers = (given[0], formats.dequantize(stored), *given[2:])
    mine = found(qkv_norm_rope_insert, (given[0], stored, *given[2:]), **SPARSE)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(mine, found(qkv_norm_rope_insert, numbers, **SPARSE), strict=True)
    )


def test_negative_slots_and_other_bytes(run):
    """A negative slot writes nothing and its query is made; guard bands and every other byte stay as they were."""
    given = list(inputs(6))
    given[7] = given[7].clone()
    given[7][2] = -1
    (q, index_q), caches = run("qkv_norm_rope_insert", *given, **SPARSE)
    assert torch.isfinite(q).all()
    assert torch.isfinite(index_q).all()
    assert int((~caches["kv"].buf.isnan()).sum()) == 5 * 2 * 256
    assert int((~caches["index_cache"].buf.isnan()).sum()) == 6 * 128


def test_no_tokens(run):
    """Nothing in, nothing out, nothing written."""
    (q, index_q), caches = run("qkv_norm_rope_insert", *inputs(0), **SPARSE)
    assert q.shape == (0, 8, 128)
    assert index_q.shape == (0, 2, 128)
    assert caches["kv"].buf.isnan().all()


def test_a_token_does_not_depend_on_its_batch():
    """Each token alone has the query that it has in the batch, but for the order of a product's sums."""
    given = inputs(6, dtype=torch.float32)
    whole, _ = qkv_norm_rope_insert(*given, **SPARSE)
    for row in range(6):
        own = [given[at][row : row + 1] if at in (0, 3, 7, 8) else given[at] for at in range(len(given))]
        assert_rows(qkv_norm_rope_insert(*own, **SPARSE)[0], whole[row : row + 1], 1e-6)


def test_fp64_is_the_oracle():
    """fp64 hidden states are computed in fp64: closer to the formulas than fp32 by far."""
    given = inputs(4, dtype=torch.float32)
    wide = (given[0].double(), *given[1:])
    q, _ = qkv_norm_rope_insert(*wide, **SPARSE)
    assert q.dtype == torch.float64
    assert_rows(qkv_norm_rope_insert(*given, **SPARSE)[0], q, 1e-6)
