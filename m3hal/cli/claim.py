"""Re-checks claims that `m3hal conform --json FILE` wrote, and tabulates them.

    m3hal claim verify claim.json               its digest, the suite's cases, the installed files
    m3hal claim verify claims/ other.json       of several, or of a folder's *.json, a line each
    m3hal claim compare before.json after.json  what differs
    m3hal claim matrix [claim.json ...]         what is proved where: device, operator, KV format

`m3hal claim ACTION --help` says what each takes.

verify exits with 0 when every claim holds here, else with the worst of 3: this machine lacks the backend and can't
tell, 1: edited or stale, 2: a file is no claim of this suite's version. compare exits with 1 when something differs.
matrix takes the claims of installed backends and those of the files, as far as they are about what is installed.
"""

from __future__ import annotations

import argparse

from m3hal.cli.conform import suite
from m3hal.dispatch.errors import ConfigurationError

HELP = "verify claims, compare two, or tabulate what claims prove"
#: action -> its help, and the fewest and the most files that it takes
_ACTIONS: dict[str, tuple[str, int, float]] = {
    "verify": ("whether claims hold here; of several files, and of a folder's *.json, a line each", 1, float("inf")),
    "compare": ("what differs between two claims", 2, 2),
    "matrix": (
        "what the claims of installed backends, and of the files and folders named, prove: per device, operator and "
        "KV format",
        0,
        float("inf"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An action and its files."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (told, _, most) in _ACTIONS.items():
        sub = actions.add_parser(name, help=told, description=f"{told[0].upper()}{told[1:]}.")
        sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object")
        sub.add_argument(
            "files", nargs="*", metavar="FILE", help="a claim" if most == 2 else "a claim, or a folder of them"
        )
        if name == "matrix":
            sub.add_argument("--device", action="append", default=[], help="only its rows; may be repeated")
            sub.add_argument(
                "--op", action="append", default=[], metavar="OPERATOR", help="only its rows; may be repeated"
            )


def run(arguments: argparse.Namespace) -> int:
    """Runs one of them."""
    _, fewest, most = _ACTIONS[arguments.action]
    named = len(arguments.files)
    if not fewest <= named <= most:
        wanted = "two files" if most == 2 else "at least one file or folder"
        raise ConfigurationError(f"claim {arguments.action} takes {wanted}, not {named}.")
    code: int = suite("m3hal_conformance.claims").claims(arguments)
    return code
