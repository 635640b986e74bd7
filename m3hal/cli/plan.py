"""Writes a plan to a file, or says what differs between two.

    m3hal plan export plan.json --device cuda:sm_90 --backend triton,reference
    m3hal plan diff before.json after.json
    m3hal plan diff plan.json --device cuda:sm_90        with the plan that would be made now

The options are those of `m3hal explain`. A file that was exported is pinned by the configuration key "plan", or
M3HAL_PLAN: then that plan comes out, or a sentence that says what differs. diff exits with 0 when the plans are the
same, 1 when anything differs, also a version or a level; export with 3 when vLLM's in-tree model would stay because
nothing supports the device.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from m3hal.cli._planning import add_planning, left_in_tree, planned
from m3hal.cli.output import emit
from m3hal.dispatch import pin
from m3hal.dispatch.differences import Difference, differences, differences_table
from m3hal.dispatch.errors import ConfigurationError

HELP = "export a plan, or compare two"
_FILES = {"export": ("one file", (1,)), "diff": ("one file or two", (1, 2))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An action, its files, and what to plan."""
    parser.add_argument("action", choices=tuple(_FILES))
    parser.add_argument("files", nargs="+", metavar="FILE")
    add_planning(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs one of the two."""
    told, allowed = _FILES[arguments.action]
    if len(arguments.files) not in allowed:
        raise ConfigurationError(f"plan {arguments.action} takes {told}; got {len(arguments.files)}.")
    return _export(arguments) if arguments.action == "export" else _diff(arguments)


def _export(arguments: argparse.Namespace) -> int:
    path = Path(arguments.files[0])
    if os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        raise ConfigurationError(f"plan export takes a file, and {path} is a folder.")
    made = planned(arguments)
    pin.export(made, str(path))
    data = {"wrote": str(path), "fingerprint": made.fingerprint, "device": made.device, "in_tree": made.in_tree}
    emit(arguments, data, f"wrote {path}: plan {made.fingerprint} for {made.device}")
    return 3 if left_in_tree(made) else 0


def _diff(arguments: argparse.Namespace) -> int:
    old = pin.read(arguments.files[0])
    here = len(arguments.files) == 1
    new = planned(arguments).to_json() if here else pin.read(arguments.files[1])
    names = (arguments.files[0], "here" if here else arguments.files[1])
    found = differences(old, new)
    data = {
        "fingerprints": [old["fingerprint"], new["fingerprint"]],
        "same_fingerprint": old["fingerprint"] == new["fingerprint"],
        "differences": [vars(row) for row in found],
    }
    emit(arguments, data, _text(found, names, (old["fingerprint"], new["fingerprint"])))
    return 1 if found or old["fingerprint"] != new["fingerprint"] else 0


def _text(found: list[Difference], names: tuple[str, str], prints: tuple[str, str]) -> str:
    if not found:
        same = f"the same plan, {prints[0]}"
        return same if prints[0] == prints[1] else f"fingerprints {prints[0]} and {prints[1]}: another m3hal wrote one"
    same = "one fingerprint, so a pin accepts either" if prints[0] == prints[1] else "two fingerprints"
    return f"{differences_table(found, names)}\n{prints[0]}, {prints[1]}: {same}"
