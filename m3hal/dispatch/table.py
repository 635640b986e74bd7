"""Tables for terminals."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

_GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Left-aligned columns; the last one wraps at the terminal's width (or ``width`` characters).

    Without a terminal, nothing wraps: a log or a pipe gets one line per row.
    """
    width = shutil.get_terminal_size((0, 0)).columns if width is None else width
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    indent = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    room = width - indent
    lines = []
    for number, row in enumerate(cells):
        head = _GAP.join(cell.ljust(size) for cell, size in zip(row[:-1], widths[:-1], strict=True))
        wrapped = textwrap.wrap(row[-1], room) if room >= 20 else [row[-1]]
        start = head + _GAP if len(header) > 1 else ""
        lines.append((start + (wrapped[0] if wrapped else "")).rstrip())
        lines += [" " * indent + line for line in wrapped[1:]]
        if number == 0:
            lines.append(
                _GAP.join(
                    "-" * min(size, max(room, 20) if i == len(widths) - 1 else size) for i, size in enumerate(widths)
                )
            )
    return "\n".join(lines)
