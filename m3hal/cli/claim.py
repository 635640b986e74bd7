"""Re-checks claims that `m3hal conform --json FILE` wrote, and tabulates them.

    m3hal claim verify claim.json               its digest, the suite's cases, the installed files
    m3hal claim compare before.json after.json  what differs
    m3hal claim matrix [claim.json ...]         what is proved where: device, operator, KV format

verify exits with 0 when the claim holds here, 1 when it was edited or is stale, 3 when this machine lacks the backend
and can't tell. compare exits with 1 when something differs. A file that is no claim of this suite's version gives 2.
matrix takes the claims of installed backends and those of the files, as far as they are about what is installed.
"""

from __future__ import annotations

import argparse

from m3hal.cli.conform import suite
from m3hal.dispatch.errors import ConfigurationError

HELP = "verify a claim, compare two, or tabulate what claims prove"
_FILES = {"verify": 1, "compare": 2, "matrix": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An action and its files."""
    parser.add_argument("action", choices=tuple(_FILES))
    parser.add_argument("files", nargs="*", metavar="FILE")


def run(arguments: argparse.Namespace) -> int:
    """Runs one of them."""
    wanted = _FILES[arguments.action]
    if wanted is not None and len(arguments.files) != wanted:
        named = len(arguments.files)
        raise ConfigurationError(f"claim {arguments.action} takes {wanted} file{'s' * (wanted > 1)}, not {named}.")
    code: int = suite("m3hal_conformance.command").claims(arguments)
    return code
