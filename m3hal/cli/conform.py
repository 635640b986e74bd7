"""Is an implementation the operator it says it is: asks a backend every case of the conformance suite.

    m3hal conform --backend acme --quick                    the small cases
    m3hal conform --backend acme --op sparse_attention
    m3hal conform --backend acme --case sparse_attention/needle
    m3hal conform --backend acme --json claim.json --html report.html
    m3hal conform --backend acme --require batch_invariant --jobs 4

Exits with 0 when nothing failed, 1 when a case failed, 2 when the request means nothing, 3 when the backend, or none of
its implementations, can be run here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from types import ModuleType

from m3hal.cli._supervised import DIARY, supervised
from m3hal.dispatch.errors import UnsupportedError

HELP = "ask a backend every case of the conformance suite"
#: --json takes a file here: the claim
JSON_IS_A_FLAG = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to ask, of whom, and what to write."""
    parser.add_argument("--backend", help="its name; M3HAL_BACKEND when left out")
    parser.add_argument("--device", help="as `m3hal devices` lists it; this machine's first when left out")
    parser.add_argument("--op", action="append", default=[], metavar="OPERATOR", help="only its cases; may be repeated")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="ID",
        help="a case, or the first whole parts of its id, such as sparse_attention/needle; may be repeated",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the small cases only; the reference takes about a minute of one core",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="other numbers of the same structure (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="torch's CPU threads while the implementation runs (default: torch's own number; 1 for the reference); "
        "oracles and comparisons always take 1, as their tensors are small",
    )
    add_require(parser)
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="processes that ask at once, at most one a core (default: %(default)s)",
    )
    parser.add_argument("--waivers", metavar="FILE", help="TOML: known failures, each with an issue and an expiry")
    parser.add_argument("--list", action="store_true", help="print the ids of the cases and run none")
    parser.add_argument("--json", metavar="FILE", help="write the claim")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")


def add_require(parser: argparse.ArgumentParser) -> None:
    """The option by which a backend's slower variants are asked, or timed."""
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="TRAIT[=VALUE]",
        help="take only implementations that declare it, such as batch_invariant or p_dtype=float32; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the suite, from a command line in a process of its own; raises UnsupportedError when it isn't installed."""
    if arguments.is_command_line and not arguments.list and DIARY not in os.environ:
        return supervised(sys.argv[1:])
    code: int = suite("m3hal_conformance.command").conform(arguments)
    return code


def suite(module: str) -> ModuleType:
    """A module of the conformance suite, which the core does not depend on."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("m3hal_conformance", "torch"):
            raise
        raise UnsupportedError(
            f"this command needs the conformance suite, and {error.name} is not installed; "
            "pip install 'm3hal[conformance]'"
        ) from error
