"""The relations fail on kernels that break them."""

import pytest
from m3hal_conformance import assert_row_alone, unchanged
from m3hal_conformance.inputs import generator, tail_heavy

from m3hal.layouts import KVLayout

X = tail_heavy(7, 64, rng=generator("relations"))


def test_independent_rows_pass():
    """A row-wise kernel gives the same bits alone."""
    assert_row_alone(lambda rows: X[list(rows)] * 2, len(X))


def test_a_row_that_depends_on_the_batch_fails():
    """A scale taken over the whole batch shows as soon as a row runs alone."""

    def by_batch(rows):
        x = X[list(rows)]
        return x / x.abs().max()

    with pytest.raises(AssertionError, match="alone"):
        assert_row_alone(by_batch, len(X))
    with pytest.raises(AssertionError, match="alone"):
        assert_row_alone(by_batch, len(X), bound=1e-3)


def test_rounding_differences_need_a_bound():
    """Another order of summation is within a bound but not the same bits."""

    def rounded(rows):
        x = X[list(rows)]
        return x * (1 + 1e-6 * len(x))

    assert_row_alone(rounded, len(X), bound=1e-4)
    with pytest.raises(AssertionError, match="bits"):
        assert_row_alone(rounded, len(X))


def test_rows_may_differ_in_length():
    """A request's row is its tokens; a run returns one tensor per request."""
    tokens = [X[:2], X[2:3], X[3:]]
    assert_row_alone(lambda requests: [tokens[i] + 1 for i in requests], 3)


def test_unchanged_sees_a_write_anywhere():
    """A byte of a cache's buffer, for instance."""
    cache = KVLayout("hnd", "bfloat16", 4, 2, 8, True).empty(3)
    cache.buf.fill_(float("nan"))
    with unchanged(cache=cache, x=X):
        cache.k.sum()
    with pytest.raises(AssertionError, match=r"cache\.buf changed"), unchanged(cache=cache, x=X):
        cache.v[2, 1, 3, 7] = 0.0
