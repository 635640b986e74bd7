"""Tables for terminals."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

_GAP = "  "
#: A last column with less room than this is not wrapped.
_NARROWEST = 20


def table(header: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None) -> str:
    """Left-aligned columns; the last one wraps at the terminal's width (or ``width`` characters).

    Without a terminal, nothing wraps: a log or a pipe gets one line per row.
    """
    width = shutil.get_terminal_size((0, 0)).columns if width is None else width
    cells = [[_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    indent = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    wraps = width - indent >= _NARROWEST
    if wraps:
        widths[-1] = min(widths[-1], width - indent)
    lines = []
    for row in (cells[0], ["-" * size for size in widths], *cells[1:]):
        head = "".join(cell.ljust(size) + _GAP for cell, size in zip(row[:-1], widths[:-1], strict=True))
        first, *more = (textwrap.wrap(row[-1], widths[-1]) if wraps else [row[-1]]) or [""]
        lines.append((head + first).rstrip())
        lines += [" " * indent + line for line in more]
    return "\n".join(lines)


def _text(cell: object) -> str:
    return ("yes" if cell else "no") if isinstance(cell, bool) else str(cell)
