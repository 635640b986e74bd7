"""A cache group's one layout: operators that share a cache's bytes choose it together."""

from __future__ import annotations

from collections.abc import Sequence

from m3hal.dispatch.screen import Candidate
from m3hal.ops import Operator

#: An operator and its accepted implementations, preferred first.
Row = tuple[Operator, list[Candidate]]


def choose(rows: Sequence[Row], allowed: Sequence[str]) -> tuple[str, str]:
    """The layout that serves most operators, then the most preferred implementations; and why.

    Ties go to the layout that the engine prefers.
    """
    best = min(allowed, key=lambda layout: (*_cost(rows, layout), allowed.index(layout)))
    if len(allowed) == 1:
        return best, f"the engine allocates {best} only"
    forcing = [f"{op.name} ({_first(c).backend})" for op, c in rows if c and set(allowed) - set(_first(c).impl.layouts)]
    if forcing:
        return best, f"forced by {', '.join(forcing)}"
    return best, f"every operator takes it, and the engine prefers it among {', '.join(allowed)}"


def _first(candidates: Sequence[Candidate]) -> Candidate:
    return candidates[0]


def _cost(rows: Sequence[Row], layout: str) -> tuple[int, int]:
    """(core operators left without an implementation, places down the order that the others have to go)."""
    unserved = places = 0
    for operator, candidates in rows:
        place = next((i for i, c in enumerate(candidates) if layout in c.impl.layouts), None)
        if place is not None:
            places += place
        elif operator.kind == "core":
            unserved += 1
        else:
            places += len(candidates)
    return unserved, places
