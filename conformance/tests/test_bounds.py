"""The distances reject what a wrong kernel gives, and accept what a legitimate one gives."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from m3hal_conformance import assert_rows, assert_same_bits, assert_ulp, worst_row
from m3hal_conformance.compare import compare
from m3hal_conformance.inputs import generator, tail_heavy
from m3hal_conformance.suite import all_cases

from m3hal import ops


@pytest.fixture
def oracle() -> torch.Tensor:
    return tail_heavy(64, 4, 256, rng=generator("bounds")).double()


def test_a_rounded_output_passes(oracle):
    """bf16 rounding costs each row about 0.17 %, and no more."""
    assert 1e-3 < worst_row(oracle.bfloat16(), oracle).error < 4e-3
    assert_rows(oracle.bfloat16(), oracle, 4e-3)


def test_all_zeros_fail(oracle):
    """Returning nothing is an error of 1 in every row."""
    assert worst_row(torch.zeros_like(oracle), oracle).error == pytest.approx(1.0)


def test_one_wrong_row_among_many_is_named(oracle):
    """A single swapped row fails although the mean error is tiny, and the message says which."""
    wrong = oracle.clone()
    wrong[37, 2] = oracle[37, 3]
    with pytest.raises(AssertionError, match=r"row \(37, 2\)"):
        assert_rows(wrong, oracle, 1e-2)


def test_a_lost_tail_fails(oracle):
    """The last elements of a row weigh enough that dropping them shows."""
    wrong = oracle.clone()
    wrong[..., -32:] = 0
    assert worst_row(wrong, oracle).error > 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_where_the_oracle_is_finite_fails(oracle, bad):
    """NaN compares false with every bound, so it needs, and has, its own rule."""
    wrong = oracle.clone()
    wrong[5, 1, 0] = bad
    worst = worst_row(wrong, oracle)
    assert (worst.error, worst.row) == (math.inf, (5, 1))


@pytest.mark.parametrize(
    ("there", "here"), [(math.nan, 0.0), (math.inf, -math.inf), (math.inf, 1e30), (math.nan, math.inf)]
)
def test_finite_where_the_oracle_is_not_fails(oracle, there, here):
    """A NaN or an infinity of the oracle has to be met by the same."""
    oracle[3, 0, 7] = there
    actual = oracle.clone()
    assert worst_row(actual, oracle).error == 0
    actual[3, 0, 7] = here
    assert worst_row(actual, oracle).error == math.inf


def test_finite_elements_beside_a_nan_still_count(oracle):
    """A NaN that both have does not excuse the rest of its row."""
    oracle[3, 0, 7] = math.nan
    actual = oracle.clone()
    actual[3, 0, 8:] = 0
    assert 0.5 < worst_row(actual, oracle).error < 1.5


def test_a_zero_row_must_be_matched_exactly(oracle):
    """Nothing is small compared with zero, unless a floor says so."""
    oracle[9] = 0
    actual = oracle.clone()
    assert_rows(actual, oracle, 0.0)
    actual[9, 0, 0] = 1e-20
    assert worst_row(actual, oracle).error == math.inf
    assert worst_row(actual, oracle, floor=1.0).error < 1e-19


def test_shapes_are_not_broadcast(oracle):
    """A missing axis is an error, not a broadcast."""
    with pytest.raises(AssertionError, match="shape"):
        assert_rows(oracle[:1], oracle, 1.0)


def test_no_rows_is_no_error():
    """Zero tokens have no worst row."""
    assert worst_row(torch.empty(0, 8), torch.empty(0, 8)).row is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_unit_in_the_last_place(oracle, dtype):
    """The neighbour of the right number passes at 1 unit, the one after fails."""
    right = oracle.to(dtype)
    up = torch.full_like(right, math.inf)
    assert_ulp(right, oracle, 0.5)
    next_up = _after(right, up)
    assert_ulp(next_up, right, 1.0)
    with pytest.raises(AssertionError, match="units in the last place"):
        assert_ulp(_after(next_up, up), right, 1.0)


def test_units_of_a_pair():
    """A difference of two large numbers is measured in their units when told so, not in its own."""
    actual, oracle = torch.tensor([1e-3], dtype=torch.bfloat16), torch.tensor([2e-3])
    with pytest.raises(AssertionError):
        assert_ulp(actual, oracle)
    assert_ulp(actual, oracle, scale=torch.tensor([1.0]))


def test_units_do_not_excuse_nan():
    """NaN is not within any number of units."""
    with pytest.raises(AssertionError):
        assert_ulp(torch.tensor([math.nan]), torch.tensor([1.0]), 1e9)
    assert_ulp(torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf]))


def test_bits():
    """-0 is not 0, and equal NaN bits are equal."""
    assert_same_bits(torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]))
    with pytest.raises(AssertionError, match=r"first \(1,\)"):
        assert_same_bits(torch.tensor([0.0, -0.0]), torch.tensor([0.0, 0.0]))
    with pytest.raises(AssertionError, match="expected"):
        assert_same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))


def _after(tensor: torch.Tensor, towards: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in (torch.float32, torch.bfloat16):
        return torch.nextafter(tensor, towards)
    step = torch.where(tensor >= 0, 1, -1).to(torch.int16)
    return (tensor.view(torch.int16) + step).view(tensor.dtype)


@pytest.mark.parametrize(("operator", "alike"), [("quantize", True), ("dequantize", True), ("rope_partial", False)])
def test_a_nan_that_rounding_makes_may_have_any_pattern(operator: str, alike: bool) -> None:
    """Hardware chooses it where an operator makes numbers; what only moves numbers keeps theirs."""
    patterns = (torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16) for bits in (0x7FC0, 0x7FFF))
    quiet, full = ({"out": pattern} for pattern in patterns)
    definition = replace(ops.load(operator), numeric=ops.Numeric("X"))
    case = next(case for case in all_cases() if case.operator == operator)
    judged = partial(compare, definition, case.site, bounds=lambda output, metric: 0.0)
    assert all(score.passed for score in judged(full, quiet)) == alike
    assert not all(score.passed for score in judged({"out": torch.zeros(1, dtype=torch.bfloat16)}, quiet))
