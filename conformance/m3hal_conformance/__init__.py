"""Decides whether an implementation is the operator it says it is: the primitives that every check is made of."""

from m3hal_conformance.bounds import (
    WorstRow,
    assert_rows,
    assert_same_bits,
    assert_ulp,
    bits,
    row_errors,
    worst_row,
)
from m3hal_conformance.guard import Slab, run_guarded
from m3hal_conformance.relations import assert_row_alone, unchanged
from m3hal_conformance.trees import map_tensors, tensors

__all__ = [
    "Slab",
    "WorstRow",
    "assert_row_alone",
    "assert_rows",
    "assert_same_bits",
    "assert_ulp",
    "bits",
    "map_tensors",
    "row_errors",
    "run_guarded",
    "tensors",
    "unchanged",
    "worst_row",
]
