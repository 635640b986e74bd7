"""rope_partial: NeoX halves of the first rotary_dim dimensions; the rest is the same bits."""

import math

import pytest
import torch
from m3hal_conformance import assert_row_alone, assert_rows, assert_same_bits, assert_ulp, worst_row
from m3hal_conformance.inputs import generator, tail_heavy

from m3hal.ops.rope_partial import rope_partial, rope_table

THETA = 5e6
TABLE = rope_table(1024, 64, THETA)


def turned_by_hand(x, positions, rotary_dim, table):
    """Pairs (i, i + half) as complex numbers, in fp64."""
    half = rotary_dim // 2
    x = x.double()
    turn = torch.complex(table[positions, :half].double(), table[positions, half:].double())[:, None]
    pair = torch.complex(x[..., :half], x[..., half:rotary_dim]) * turn
    return torch.cat([pair.real, pair.imag, x[..., rotary_dim:]], -1)


def pair_size(x, rotary_dim):
    """Magnitude of each element's pair, which a rotation keeps."""
    half = rotary_dim // 2
    size = torch.hypot(x[..., :half].double(), x[..., half:rotary_dim].double())
    return torch.cat([size, size, x[..., rotary_dim:].double().abs()], -1)


def test_one_pair_by_hand(run):
    """[1, 0 | 0, 0 | 9, 9]: dimension 0 turns into dimension 2, its partner half a rotary width away."""
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.6, 0.8, 0.8, 0.6]])
    x = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 9.0, 9.0]], [[0.0, 2.0, 0.0, 0.0, 9.0, 9.0]]])
    out = run("rope_partial", x, torch.tensor([1, 1]), table, rotary_dim=4)
    torch.testing.assert_close(out[0, 0], torch.tensor([0.6, 0.0, 0.8, 0.0, 9.0, 9.0]))
    torch.testing.assert_close(out[1, 0], torch.tensor([0.0, 1.6, 0.0, 1.2, 9.0, 9.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_against_complex_numbers(run, dtype, tokens):
    """Rounded once; dimensions that do not turn are bit-identical, NaN included."""
    rng = generator("rope/complex")
    x = tail_heavy(tokens, 3, 128, rng=rng).to(dtype)
    if tokens:
        x[0, 0, 100] = math.nan
    positions = torch.randint(1024, (tokens,), generator=rng)
    out = run("rope_partial", x, positions, TABLE, rotary_dim=64)
    ulps = 0.51 if dtype == torch.bfloat16 else 1.5  # fp32 rounds both products and their sum
    assert_ulp(out, turned_by_hand(x, positions, 64, TABLE), ulps, scale=pair_size(x, 64))
    assert_same_bits(out[..., 64:], x[..., 64:].contiguous())


def test_position_zero_changes_nothing(run):
    """cos 0 = 1, sin 0 = 0."""
    x = tail_heavy(2, 2, 128, rng=generator("rope/zero"))
    assert torch.equal(run("rope_partial", x, torch.zeros(2, dtype=torch.int64), TABLE, rotary_dim=64), x)


def test_scores_depend_on_distance_alone(run):
    """q at p + d against k at p is the same for every p."""
    rng = generator("rope/distance")
    q, k = (torch.randn(1, 1, 128, generator=rng).expand(3, 1, 128) for _ in range(2))
    start = torch.tensor([0, 127, 900])
    turned = [run("rope_partial", x, p, TABLE, rotary_dim=64) for x, p in ((q, start + 77), (k, start))]
    scores = (turned[0] * turned[1]).sum(-1).flatten()
    torch.testing.assert_close(scores, scores[:1].expand(3), rtol=1e-4, atol=1e-4)


def test_table():
    """The second frequency of M3 is theta ** (-2/64); far positions have fp32 angles."""
    assert TABLE.dtype == torch.float32
    assert float(torch.atan2(TABLE[1, 33], TABLE[1, 1])) == pytest.approx(0.6175287, rel=1e-6)
    far = rope_table(1_048_576, 4, THETA)
    inverse = torch.tensor([1.0, THETA**-0.5], dtype=torch.float64)
    for position in (0, 1, 127, 128, 524_287, 1_048_575):
        angle = (position * inverse).float().double()
        assert torch.allclose(far[position].double(), torch.cat([angle.cos(), angle.sin()]), atol=5e-4)


def test_the_wrong_pairing_fails_the_check(run, exact):
    """Interleaved pairs, or a rotation over the full width, are far outside."""
    x = tail_heavy(4, 2, 128, rng=generator("rope/pairing"))
    positions = torch.tensor([1, 5, 100, 1000])
    oracle = exact("rope_partial", x, positions, TABLE, rotary_dim=64)
    shuffled = torch.cat([x[..., 0:64:2], x[..., 1:64:2], x[..., 64:]], -1)
    assert worst_row(rope_partial(shuffled, positions, TABLE, rotary_dim=64), oracle).error > 0.1
    wide = rope_table(1024, 128, THETA)
    assert worst_row(rope_partial(x, positions, wide, rotary_dim=128), oracle).error > 0.1


def test_heads_of_the_projection(run):
    """Heads cut out of a wider row give what their copy gives; each head is turned alike."""
    row = tail_heavy(5, 900, rng=generator("rope/strided"))
    heads = row[:, 100 : 100 + 4 * 128].view(5, 4, 128)
    positions = torch.arange(5) * 100
    out = run("rope_partial", heads, positions, TABLE, rotary_dim=64)
    assert torch.equal(out, run("rope_partial", heads.clone(), positions, TABLE, rotary_dim=64))
    assert torch.equal(out[:, 2:3], run("rope_partial", heads[:, 2:3], positions, TABLE, rotary_dim=64))


def test_a_bf16_table_is_emulated(exact):
    """vLLM keeps the table in bf16: an error of its own, reproduced on demand."""
    x = tail_heavy(50, 2, 128, rng=generator("rope/table"))
    positions = torch.arange(50) * 20
    rounded = rope_partial(x, positions, TABLE, rotary_dim=64, traits={"rope_table": "bfloat16"})
    assert_rows(rounded, rope_partial(x, positions, TABLE.bfloat16().float(), rotary_dim=64), 0.0)
    assert 5e-4 < worst_row(rounded, exact("rope_partial", x, positions, TABLE, rotary_dim=64)).error < 4e-3


def test_a_row_does_not_depend_on_its_batch():
    """The same bits alone and among others."""
    x, positions = tail_heavy(9, 2, 128, rng=generator("rope/rows")), torch.arange(9) * 99
    assert_row_alone(lambda rows: rope_partial(x[list(rows)], positions[list(rows)], TABLE, rotary_dim=64), 9)
