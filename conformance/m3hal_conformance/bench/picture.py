"""The table as a picture: what share of its floor each row reaches, and where the fastest rival is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m3hal.dispatch.errors import ConfigurationError, M3halError
from m3hal_conformance.bench.table import Measured, is_alike

#: shares of rivals are drawn up to this one
BEYOND = 1.1


def check_drawable() -> None:
    """Raises ConfigurationError where matplotlib, which draws, isn't there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        told = "--png needs matplotlib: pip install 'm3hal-conformance[bench]'; the table's bars say the same."
        raise ConfigurationError(told) from error


def draw(rows: Sequence[Measured], path: Path, title: str) -> None:
    """A PNG: a bar to every row's share of its floor, and a mark where its fastest rival would end.

    Raises ConfigurationError where no row has a share or matplotlib isn't there, M3halError where it can't be written.
    """
    check_drawable()
    from matplotlib.figure import Figure

    drawn = [row for row in rows if row.share is not None]
    if not drawn:
        raise ConfigurationError(f"there are no shares to draw in {path}: no row that was timed has a floor.")
    figure = Figure(figsize=(9, 1.6 + 0.19 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    kinds = list(dict.fromkeys(row.operator for row in drawn))
    shares = [row.share or 0.0 for row in drawn]
    axes.barh(
        [f"{row.operator}  {row.case}" for row in drawn],
        [min(share, 1) for share in shares],
        color=[f"C{kinds.index(row.operator) % 10}" for row in drawn],
        alpha=0.7,
    )
    for place, share in enumerate(shares):
        if share > 1:  # what lies in the cache is read faster than memory
            axes.annotate(f"{share:.0%}", (BEYOND, place), (6, 0), textcoords="offset points", fontsize=6, va="center")
    _mark(axes, drawn)
    if any(row.ratio for row in drawn):
        figure.legend(loc="outside lower center", fontsize=8, frameon=False)
    axes.invert_yaxis()
    ticks = [tick / 5 for tick in range(6)]
    axes.set(xlim=(0, BEYOND + 0.06), xlabel="share of the floor", title=title)
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.tick_params(axis="y", labelsize=6)
    axes.margins(y=0.01)
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise M3halError(f"{path} can't be drawn: {error}.") from error


def _mark(axes: Any, drawn: Sequence[Measured]) -> None:
    """Where the fastest rival's bar would end: right of ours it is faster. Hollow where it is of another kind."""
    kinds = (
        (True, "black", "fastest rival; beyond the bar's end it is faster than m3hal"),
        (False, "white", "the same, of another format, of ours, or dense attention"),
    )
    for alike, colour, label in kinds:
        places = [
            (min((row.share or 0.0) / row.ratio, BEYOND), place)
            for place, row in enumerate(drawn)
            if row.ratio and is_alike(row.best) is alike
        ]
        if places:
            across, down = zip(*places, strict=True)
            look = {"facecolor": colour, "edgecolor": "black", "linewidth": 0.7, "marker": "D", "s": 14}
            axes.scatter(across, down, zorder=3, label=label, **look)
