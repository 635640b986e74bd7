"""What a row of the table consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from m3hal_conformance.bench.bench import Bench

Call = Callable[[], object]
#: candidates by name, each a call for each set of inputs; "m3hal" is the plan's, every other a rival or a variant
Calls = dict[str, Sequence[Call]]
#: how far an output is from the exact one, 0: equal; the limit is the check's own
Check = Callable[[], float]


class Wrong(Exception):
    """An output that is not the operator's, as a sentence."""


@dataclass(frozen=True)
class Floor:
    """The least that a call must do: bytes read and written once each, and operations of one unit.

    unit: of the operations, a key of the ceilings: "bfloat16", "float8".
    """

    read: float = 0
    written: float = 0
    flops: float = 0
    unit: str = "bfloat16"

    def microseconds(self, ceilings: Mapping[str, float]) -> float | None:
        """The larger of both, at the rates measured on the device; None where the unit was not measured."""
        copies = self.written > self.read / 8
        rate = ceilings.get("copy_GBps" if copies else "read_GBps")
        size = self.read + self.written
        times = [size / rate / 1e3] if rate and size else []
        if self.flops:
            unit = ceilings.get(f"{self.unit}_TFLOPs")
            if unit is None:
                return None
            times.append(self.flops / unit / 1e6)
        return max(times, default=None)


@dataclass(frozen=True)
class Work:
    """A row's inputs, allocated, and what to do with them.

    calls: what is timed; a rival whose formats are not the row's has its own in its name, and is marked. floor: of one
    call. checks: candidate -> how far its output is from the exact one after its first call, over an output that was
    poisoned. limit: of that distance. timing: ``chained`` replays a graph of calls over rotating inputs; ``single``
    times calls one by one behind a flush of the cache; ``host`` is the time until the host has enqueued the call.
    facts: more columns of the JSON. absent: why the peer has no column.
    """

    calls: Mapping[str, Sequence[Call]]
    floor: Floor | None
    checks: Mapping[str, Check] = field(default_factory=dict)
    limit: float = 0.01
    timing: Literal["chained", "single", "host"] = "chained"
    facts: Mapping[str, object] = field(default_factory=dict)
    absent: str = ""


@dataclass(frozen=True)
class Row:
    """A line of the table. operator: what ``--op`` names. case: the rest of its title. prepare: makes the work.

    needs: the operators that a backend must serve for it, with the traits that they are asked for; its own when empty.
    """

    operator: str
    case: str
    prepare: Callable[[Bench], Work]
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", self.needs or (self.operator,))
