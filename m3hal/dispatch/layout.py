"""A cache group's one layout: operators that share a cache's bytes choose it together."""

from __future__ import annotations

from collections.abc import Sequence

from m3hal.dispatch.errors import M3halError
from m3hal.dispatch.screen import Candidate
from m3hal.layouts import CACHE_FORMATS, PAGE_MAPS
from m3hal.ops import Operator

#: An operator and its accepted implementations, preferred first.
Row = tuple[Operator, list[Candidate]]


def holding(kv_format: str, offered: Sequence[str]) -> tuple[str, ...]:
    """The offered layouts that can hold a format; a private layout, which only its vendor knows, can hold any.

    Raises M3halError when none can.
    """
    fitting = CACHE_FORMATS.get(kv_format, PAGE_MAPS)
    found = tuple(layout for layout in offered if layout in fitting or layout not in PAGE_MAPS)
    if not found:
        raise M3halError(
            f"a cache of format {kv_format!r} lies in pages of layout {' or '.join(fitting)}; "
            f"the engine allocates {', '.join(offered) or 'none'}."
        )
    return found


def choose(rows: Sequence[Row], allowed: Sequence[str]) -> tuple[str, str]:
    """The layout that serves most operators, then the most preferred implementations; and why.

    Ties go to the layout that the engine prefers.
    """
    if len(allowed) == 1:
        return allowed[0], f"the engine allocates {allowed[0]} only"
    best = min(allowed, key=lambda layout: (*_cost(rows, layout), allowed.index(layout)))
    others = [layout for layout in allowed if layout != best]
    forcing = [_name(row) for row in rows if any(_place(row, best) < _place(row, other) for other in others)]
    yielding = [_name(row) for row in rows if any(_place(row, best) > _place(row, other) for other in others)]
    reason = f"forced by {', '.join(forcing)}" if forcing else f"the engine prefers it among {', '.join(allowed)}"
    return best, reason + (f"; {', '.join(yielding)} would rather have another" if yielding else "")


def _name(row: Row) -> str:
    operator, candidates = row
    return f"{operator.name} of {candidates[0].backend}"


def _place(row: Row, layout: str) -> int:
    """How far down its list an operator has to go for a layout."""
    _, candidates = row
    return next((i for i, c in enumerate(candidates) if layout in c.impl.layouts), len(candidates))


def _cost(rows: Sequence[Row], layout: str) -> tuple[int, int]:
    """(core operators left without an implementation, places down the order that the others have to go)."""
    places = [(operator, candidates, _place((operator, candidates), layout)) for operator, candidates in rows]
    unserved = sum(operator.kind == "core" and place == len(candidates) for operator, candidates, place in places)
    return unserved, sum(place for _, _, place in places)
