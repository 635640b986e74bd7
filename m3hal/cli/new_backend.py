"""Writes an installable backend: manifest, probe, one operator, its conformance file, a CI job.

    m3hal new-backend acme
    pip install -e m3hal-acme
    m3hal conform --backend acme --quick

It passes at once. Then replace the operator's body, and add others: docs/adding-a-backend.md.
"""

from __future__ import annotations

import argparse
import json
import keyword
import os
import re
from pathlib import Path

from m3hal.cli._scaffold import FILES
from m3hal.dispatch.discovery import REFERENCE
from m3hal.dispatch.errors import ConfigurationError
from m3hal.dispatch.names import RESERVED

HELP = "write a new backend that can be installed and passes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its name, and where to put it."""
    parser.add_argument("name", help="lower-case letters, digits and '_'; what users will write")
    parser.add_argument("--into", metavar="FOLDER", default=".", help="where the folder m3hal-NAME is made")


def run(arguments: argparse.Namespace) -> int:
    """Writes the files; refuses a folder that is there already."""
    name: str = arguments.name
    if name in (*RESERVED, REFERENCE):
        raise ConfigurationError(f"the name {name!r} is reserved by m3hal; choose another, e.g. 'acme'.")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigurationError(
            f"{name!r} can't be a backend's name; use lower-case letters, digits and '_', e.g. 'acme'."
        )
    if keyword.iskeyword(name):
        raise ConfigurationError(f"{name!r} is a word of Python's own; choose another, e.g. {name + '_kernels'!r}.")
    root = Path(arguments.into) / f"m3hal-{name}"
    if os.path.lexists(root):
        raise ConfigurationError(f"{root} is there already; remove it, or choose another name or --into.")
    try:
        for path, text in FILES.items():
            target = root / path.replace("NAME", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("NAME", name).replace("Name", name.capitalize()))
    except OSError as error:
        raise ConfigurationError(f"{root} can't be written ({error}); choose another --into or name.") from error
    commands = [f"pip install -e {root}", f"m3hal conform --backend {name} --quick", f"pytest {root}"]
    if arguments.json:
        print(json.dumps({"folder": str(root), "files": sorted(FILES), "next": commands}, indent=2))
    else:
        print("\n  ".join([f"wrote {root}. Next:", *commands]))
    return 0
