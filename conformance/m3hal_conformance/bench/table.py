"""The table: measured rows as text, JSON and a picture of what share of its floor each reaches."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from m3hal.dispatch.errors import M3halError
from m3hal.dispatch.table import table

#: characters of a full bar
BAR = 24


@dataclass(frozen=True)
class Measured:
    """A row as it was measured.

    status: ``measured``, ``checked`` (outputs only), ``wrong``, ``failed`` or ``unsupported``; reason: of the last
    three. us: candidate -> median microseconds; spread: its slowest run less its fastest, over the median. floor_us: at
    the device's ceilings. share: of the floor that ours reaches. ratio: of the best rival to ours; best: its name.
    errors: candidate -> distance from the exact output.
    """

    operator: str
    case: str
    status: str
    reason: str = ""
    us: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    runs: int = 0
    floor_us: float | None = None
    share: float | None = None
    ratio: float | None = None
    best: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    peer_absent: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Measured:
        """What ``to_json`` returned. Raises TypeError for a row of another kind."""
        row = cls(**found)
        numbers = [*row.us.values(), *(n for n in (row.floor_us, row.share, row.ratio) if n is not None)]
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise TypeError(f"the times and shares of {row.operator} are no numbers")
        if not all(isinstance(text, str) for text in (row.operator, row.case, row.status, row.reason)):
            raise TypeError("a row has an operator, a case and a status, in words")
        return row

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in ("", None, {}, 0)}


def line(row: Measured) -> tuple[str, ...]:
    """One line of the text table."""
    if not row.us:
        return row.operator, row.case, "", "", "", "", row.status + (f": {row.reason}" if row.reason else "")
    ours = f"{row.us['m3hal']:.1f}" if "m3hal" in row.us else ""
    rivals = "  ".join(f"{name} {us:.1f}" for name, us in row.us.items() if name != "m3hal")
    share = "" if row.share is None else f"{row.share:4.0%} {'#' * round(BAR * min(row.share, 1))}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    floor = "" if row.floor_us is None else f"{row.floor_us:.1f}"
    return row.operator, row.case, floor, ours, ratio, share, rivals or row.peer_absent


def text(rows: Sequence[Measured]) -> str:
    """Microseconds; ratio: best rival / ours; share: floor / ours."""
    return table(
        ("operator", "case", "floor", "m3hal", "ratio", "share of floor", "rivals"), [line(row) for row in rows]
    )


def to_json(rows: Sequence[Measured], machine: Mapping[str, Any], ceilings: Mapping[str, float], command: str) -> str:
    """What ``--json`` writes; a row in a line, so that two files can be compared by eye."""
    head = {
        "command": command,
        "m3hal": importlib.metadata.version("m3hal"),
        "machine": dict(machine),
        "ceilings": dict(ceilings),
    }
    lines = ",\n  ".join(json.dumps(_rounded(row.to_json())) for row in rows)
    return json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def picture(rows: Sequence[Measured], path: Path, title: str) -> str | None:
    """A PNG of every row's share of its floor; why there is none, as a sentence, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No picture: it needs matplotlib; pip install 'm3hal-conformance[bench]'. The table's bars say the same."
    drawn = [(f"{row.operator}  {row.case}", row.operator, row.share) for row in rows if row.share is not None]
    figure = Figure(figsize=(9, 1.2 + 0.19 * max(len(drawn), 1)), layout="constrained")
    axes = figure.subplots()
    kinds = list(dict.fromkeys(operator for _, operator, _ in drawn))
    colours = [f"C{kinds.index(operator) % 10}" for _, operator, _ in drawn]
    axes.barh([name for name, _, _ in drawn], [min(share, 1) for _, _, share in drawn], color=colours)
    for place, (_, _, share) in enumerate(drawn):
        if share > 1:  # what lies in the cache is read faster than memory
            axes.annotate(f"{share:.0%}", (1, place), (2, 0), textcoords="offset points", fontsize=6, va="center")
    axes.invert_yaxis()
    ticks = [tick / 5 for tick in range(6)]
    axes.set(xlim=(0, 1.06), xlabel="share of the floor", title=title)
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.tick_params(axis="y", labelsize=6)
    axes.margins(y=0.01)
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise M3halError(f"{path} can't be drawn: {error}.") from error
    return None
