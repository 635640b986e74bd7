"""The command line: ``m3hal COMMAND``, the same as ``python -m m3hal COMMAND``.

Exit codes: 0 it passed, 1 it failed, 2 the request means nothing, 3 nothing supports it, 130 it was interrupted. Every
command takes ``--json`` and then prints one JSON object, errors included.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from m3hal import __version__
from m3hal.cli import (
    backends,
    bench,
    bisect,
    capacity,
    claim,
    conform,
    convert,
    devices,
    doctor,
    explain,
    new_backend,
    operators,
    plan,
    replay,
    validate,
)
from m3hal.cli._parser import Parser
from m3hal.cli._supervised import note_end
from m3hal.dispatch.errors import ConfigurationError, M3halError, UnsupportedError

PASS, FAIL, USAGE, UNSUPPORTED, INTERRUPTED = 0, 1, 2, 3, 130

#: what says that nothing more fits where the output goes, or that it is gone
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

#: Each has HELP, add_arguments(parser) and run(arguments) -> exit code; the docstring is its long help.
COMMANDS: dict[str, ModuleType] = {
    "devices": devices,
    "backends": backends,
    "ops": operators,
    "explain": explain,
    "plan": plan,
    "capacity": capacity,
    "doctor": doctor,
    "conform": conform,
    "claim": claim,
    "bench": bench,
    "replay": replay,
    "bisect": bisect,
    "new-backend": new_backend,
    "convert": convert,
    "validate": validate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; argparse exits with 2 by itself."""
    _open_streams()
    top = parser()
    if not (sys.argv[1:] if argv is None else argv):
        top.print_help(sys.stderr)
        return USAGE
    arguments = top.parse_args(argv)
    arguments.is_command_line = argv is None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a vendor's name may not fit the terminal's encoding
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except M3halError as error:
        _report(error, arguments.json is True)  # conform's is a file
        code = _code(error)
    except BrokenPipeError:
        _drop_output()  # the reader left, as `m3hal ops | head` does
        code = FAIL
    except OSError as error:
        code = _of_system(error, arguments.json is True)
    except KeyboardInterrupt:
        if not arguments.is_command_line:
            raise
        print("m3hal: interrupted.", file=sys.stderr)
        code = INTERRUPTED
    note_end(code)
    return code


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = Parser(prog="m3hal", description="Which kernel runs each MiniMax-M3 operator, and why.")
    top.add_argument("--version", action="version", version=f"m3hal {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        formatter = argparse.RawDescriptionHelpFormatter
        sub = commands.add_parser(name, help=module.HELP, description=module.__doc__, formatter_class=formatter)
        if getattr(module, "JSON_IS_A_FLAG", True):
            sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.set_defaults(run=module.run)
        module.add_arguments(sub)
    return top


def _open_streams() -> None:
    """Opens what whoever started this closed, so that no other file takes its number, and printing prints nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it stays open as streams do


def _drop_output() -> None:
    """What stdout still holds goes nowhere; Python would complain again when it closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_system(error: OSError, as_json: bool) -> int:
    """Tells of output that has no room, and of contents given for a file's name; raises what else the system says."""
    if error.errno == errno.ENAMETOOLONG and error.filename is not None:
        _report(ConfigurationError(f"no file is called {str(error.filename)[:40]!r}...: {error.strerror}."), as_json)
        return USAGE
    if error.filename is not None or error.errno not in _NO_ROOM:
        raise error
    _drop_output()
    print(f"m3hal: the output can't be written: {error.strerror}.", file=sys.stderr)
    return FAIL


def _code(error: M3halError) -> int:
    if isinstance(error, ConfigurationError):
        return USAGE
    return UNSUPPORTED if isinstance(error, UnsupportedError) else FAIL


def _report(error: M3halError, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps({"error": str(error), "verdicts": [verdict.to_json() for verdict in error.verdicts]}, indent=2)
        )
    else:
        print(f"m3hal: {error}", file=sys.stderr)
