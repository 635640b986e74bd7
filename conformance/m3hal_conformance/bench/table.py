"""The table: measured rows as text and JSON, and what must be known to read them."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from m3hal.dispatch.table import table

#: characters of a full bar
BAR = 24
#: words in a rival's name by which it is no other's kernel at the row's own formats
_UNLIKE = frozenset({"our", "m3hal", "dense", "bf16", "fp8", "mxfp8", "nvfp4", "mxfp4"})
#: beyond what a kernel can gain on a copy's rate, so that the floor counts what the call needn't do
_NO_FLOOR = 1.1


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
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}{'' if is_alike(row.best) else '*'}"
    floor = "" if row.floor_us is None else f"{row.floor_us:.1f}"
    return row.operator, row.case, floor, ours, ratio, share, rivals or row.peer_absent


def text(rows: Sequence[Measured]) -> str:
    """Microseconds; ratio: best rival / ours; share: floor / ours."""
    return table(
        ("operator", "case", "floor", "m3hal", "ratio", "share of floor", "rivals"), [line(row) for row in rows]
    )


def is_alike(rival: str) -> bool:
    """Whether a rival is somebody else's kernel at the row's formats; the names of others tell why they are none."""
    return not _UNLIKE & set(rival.split())


def footer(rows: Sequence[Measured], machine: Mapping[str, Any], ceilings: Mapping[str, float], command: str) -> str:
    """What the numbers are, where and when they were taken, and what the marks mean; lines."""
    runs = sorted({row.runs for row in rows if row.runs})
    what = f"microseconds, medians of {' or '.join(map(str, runs))} interleaved runs" if runs else "nothing was timed"
    label, device = machine.get("device_label"), machine["device"]
    where = [f"{label} ({device})" if label else device, f"backend {machine['backend']}"]
    where += [f"{name} {machine[name]}" for name in ("torch", "triton", "driver") if machine.get(name)]
    lines = [f"{what}; {', '.join([*where, *([machine['date']] if 'date' in machine else [])])}"]
    if ceilings:
        units = {"GBps": "GB/s", "TFLOPs": "TFLOP/s"}
        rates = [(*name.partition("_"), float(rate)) for name, rate in ceilings.items()]
        told = ", ".join(f"{name} {rate:.4g} {units.get(unit, unit)}" for name, _, unit, rate in rates)
        lines.append(f"ceilings: {told}")
    if machine.get("require"):
        lines.append(f"required of implementations: {', '.join(machine['require'])}")
    if any(row.ratio is not None and not is_alike(row.best) for row in rows):
        lines.append("* the fastest rival is of another format, of ours, or dense attention: its name says which")
    if any((row.share or 0) > _NO_FLOOR for row in rows):
        lines.append("a share far above 100 % says that its floor counts what the call needn't do, not that it is fast")
    if machine.get("peer_absent"):
        lines.append(f"no peer: {machine['peer_absent']}")
    return "\n".join([*lines, command])


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
