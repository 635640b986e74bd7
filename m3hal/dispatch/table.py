"""Tables and sentences for terminals."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

_GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None) -> str:
    """Left-aligned columns, which wrap between words to fit the terminal's width (or ``width`` characters).

    Without a terminal, nothing wraps: a log or a pipe gets one line per row.
    """
    width = _terminal(width)
    cells = [[_text(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width:
        widths = _fitted(widths, [max(map(_longest_word, column)) for column in zip(*cells, strict=True)], width)
    lines = []
    for row in (cells[0], ["-" * size for size in widths], *cells[1:]):
        wrapped = [_lines(cell, size) for cell, size in zip(row, widths, strict=True)]
        for parts in zip_longest(*wrapped, fillvalue=""):
            lines.append(_GAP.join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip())
    return "\n".join(lines)


def folded(text: str, width: int | None = None) -> str:
    """Lines that fit the terminal, or ``width`` characters; what is left of a long one hangs below it."""
    width = _terminal(width)
    return "\n".join(_fold(line, width) for line in text.splitlines()) if width else text


def _fold(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    wrap = textwrap.TextWrapper(width, indent, indent + "    ", break_long_words=False, break_on_hyphens=False)
    return wrap.fill(line.strip())


def _terminal(width: int | None) -> int:
    """Its width; 0 without one."""
    return shutil.get_terminal_size((0, 0)).columns if width is None else width


def _fitted(widths: list[int], least: list[int], width: int) -> list[int]:
    """The widest columns give way first; where no more words can be parted, lines stay longer than the terminal."""
    widths = list(widths)
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        shrinking = [column for column in range(len(widths)) if widths[column] > least[column]]
        if not shrinking:
            break
        widths[max(shrinking, key=widths.__getitem__)] -= 1
    return widths


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


def _lines(cell: str, size: int) -> list[str]:
    if len(cell) <= size:
        return [cell]
    return textwrap.wrap(cell, size, break_long_words=False, break_on_hyphens=False)


def _text(cell: object) -> str:
    return ("yes" if cell else "no") if isinstance(cell, bool) else str(cell)
