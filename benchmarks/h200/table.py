"""Prints the results as Markdown tables: python benchmarks/h200/table.py [FOLDER]."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(path: Path) -> str:
    """One row a case: the floor, ours, each peer, and best peer / ours."""
    rows = json.loads(path.read_text())["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["us"] if name != "m3hal"))
    lines = [f"| {path.stem} | floor | m3hal | {' | '.join(names)} | ratio |", "|---" * (4 + len(names)) + "|"]
    for row in rows:
        times = [f"{row['us'][n]:.1f}" if n in row["us"] else "" for n in names]
        floor = f"{row['floor_us']:.1f}" if "floor_us" in row else ""
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        cells = [f"{row['operator']} {row['case']}", floor, f"{row['us']['m3hal']:.1f}", *times, ratio]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    print("\n\n".join(table(path) for path in sorted(folder.glob("*.json"))))
