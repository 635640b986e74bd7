"""Relations that hold for every correct implementation and need no oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from m3hal_conformance.bounds import assert_rows, assert_same_bits
from m3hal_conformance.guard import changed
from m3hal_conformance.trees import map_tensors


@contextmanager
def unchanged(**inputs: Any) -> Iterator[None]:
    """Inside the block nothing writes to the given values: tensors, tuples of them, caches, metadata."""
    before = map_tensors(inputs, Tensor.clone)
    yield
    if paths := changed(before, inputs):
        raise AssertionError(f"{', '.join(paths)} changed, but the operator only reads it")


def assert_row_alone(
    run: Callable[[Sequence[int]], Sequence[Tensor]],
    count: int,
    *,
    bound: float = 0.0,
    rows: Sequence[int] | None = None,
    what: str = "output",
) -> None:
    """What a batch gives for a row is what the row gives alone.

    run: takes the indices of the rows (tokens, or requests) that make up a batch and returns one tensor for each, in
        that order; a tensor whose first axis is the row will do.
    count: rows of the whole batch. rows: those to try alone; all when None.
    bound: relative L2 error per row of the tensor; 0: bit for bit.
    """
    whole = run(range(count))
    for row in range(count) if rows is None else rows:
        (alone,) = run([row])
        label = f"{what}: row {row} in the batch against itself alone"
        if bound == 0:
            assert_same_bits(whole[row], alone, what=label)
        else:
            assert_rows(whole[row], alone, bound, what=label)
