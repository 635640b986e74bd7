"""The support matrix as text for a terminal and as a page of the manual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from m3hal.dispatch.table import table
from m3hal_conformance.support import FORMATS, STATES, Cell, Support

_MODELS = "In the column vLLM stand the versions in which a whole model was run; no model: single operators alone were."
_ENGINE = ("vllm", "torch", "device", "backend", "kv", "index", "state")


def terminal(found: Support, width: int | None = None) -> str:
    """A summary, one table for each backend and device, then models that were run."""
    parts = [table(*_summary(found, bool(found.engines)), width)]
    for name, cells in _by_place(found):
        parts.append(f"{name}\n{table(*_operators(cells), width)}")
    if found.engines:
        ran = [[run[key] for key in _ENGINE] for run in found.engines]
        parts.append(f"models that were run\n{table(_ENGINE, ran, width)}\n{_MODELS}")
    used = dict.fromkeys(cell.state for cell in found.cells)
    parts.append("\n".join(f"{state}: {STATES[state].replace('**', '')}" for state in STATES if state in used))
    return "\n\n".join(parts)


def page(found: Support) -> str:
    """docs/support.md."""
    words = "\n".join(f"| {state} | {meaning} |" for state, meaning in STATES.items())
    parts = [
        "<!-- Written by scripts/support_page.py (`make docs`) from claims; do not edit. -->\n# What runs where\n",
        "By vLLM, torch, Triton, device and KV format, as far as [claims](publishing-a-claim.md) prove it: those that "
        "the backends ship, and those in `docs/claims`. `m3hal claim matrix docs/claims` prints the same of what is "
        "installed, but for the models; without the folder it knows the installed backends' own claims alone.\n",
        f"| state | meaning |\n|---|---|\n{words}\n",
        "A cell of the first table counts operators by state; a variant, which is asked by requiring the traits in its "
        "parentheses, counts apart. A contract is no run: its torch is that of the CPU which ran the double. "
        f"{_MODELS}\n",
        _markdown(*_summary(found, True)),
    ]
    if found.engines:
        parts += [
            "\n## Models that were run\n",
            "Whole models in stock vLLM against transformers: equal tokens, in bf16 log-probabilities no further from "
            "fp32 than its own. Everywhere else single operators were run, no model.\n",
            _markdown(_ENGINE, [[run[key] for key in _ENGINE] for run in found.engines]),
        ]
    for name, cells in _by_place(found):
        parts += [f"\n## {name}\n", _markdown(*_operators(cells))]
    return "\n".join(parts) + "\n"


Table = tuple[Sequence[str], list[list[str]]]


def picked(found: Support, devices: Sequence[str], operators: Sequence[str]) -> Support:
    """The part of the matrix about some devices and operators; none named: all."""
    cells = [
        c for c in found.cells if c.device in (devices or (c.device,)) and c.operator in (operators or (c.operator,))
    ]
    places = {(cell.backend, cell.device) for cell in cells}
    software = [row for row in found.software if (row.backend, row.device) in places]
    engines = [run for run in found.engines if (run["backend"], run["device"]) in places]
    return Support(tuple(cells), tuple(software), tuple(engines))


def _summary(found: Support, has_models: bool) -> Table:
    """A row for each backend, device and kind of claim. has_models: with a column of whole models in vLLM."""
    header = ("device", "backend", "on", "torch", "Triton", *(("vLLM",) if has_models else ()), *FORMATS)
    rows = []
    for place, cells in _places(found).items():
        backend, device = place
        software = [row for row in found.software if (row.backend, row.device) == place]
        ran = ", ".join(dict.fromkeys(row.label for row in software if row.executor == "in-process" and row.label))
        on = ran or ("a double" if software else "nothing")
        torch = ", ".join(dict.fromkeys(row.torch for row in software))
        triton = ", ".join(dict.fromkeys(row.triton for row in software if row.triton))
        runs = [r for r in found.engines if (r["backend"], r["device"]) == place and not r["state"].startswith("stale")]
        vllm = ", ".join(dict.fromkeys(str(run["vllm"]) for run in runs)) or "no model"
        counts = [_counted(cell for cell in cells if cell.format == format) for format in FORMATS]
        rows.append([device, backend, on, torch, triton, *((vllm,) if has_models else ()), *counts])
    return header, rows


def _counted(cells: Iterable[Cell]) -> str:
    states = Counter((bool(cell.require), cell.state) for cell in cells)
    kinds = [(False, ""), (True, "variant ")]
    return ", ".join(
        f"{states[is_variant, state]} {word}{state}"
        for is_variant, word in kinds
        for state in STATES
        if states[is_variant, state]
    )


def _named(cell: Cell) -> str:
    """The operator, and of a variant the traits by which it is asked."""
    return f"{cell.operator} ({', '.join(cell.require)})" if cell.require else cell.operator


def _operators(cells: Sequence[Cell]) -> Table:
    states = {(_named(cell), cell.format): cell.state for cell in cells}
    names = dict.fromkeys(map(_named, cells))
    used = [format for format in FORMATS if any(cell.format == format for cell in cells)]
    return ("operator", *used), [[name, *(states.get((name, format), "") for format in used)] for name in names]


def _places(found: Support) -> dict[tuple[str, str], list[Cell]]:
    places: dict[tuple[str, str], list[Cell]] = {}
    for cell in found.cells:
        places.setdefault((cell.backend, cell.device), []).append(cell)
    return places


def _by_place(found: Support) -> list[tuple[str, list[Cell]]]:
    return [(f"{backend} on {device}", cells) for (backend, device), cells in _places(found).items()]


def _markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
