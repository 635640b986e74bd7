"""What a command prints: a JSON object, or text."""

from __future__ import annotations

import argparse
import json
from typing import Any


def emit(arguments: argparse.Namespace, data: Any, text: str) -> None:
    """Prints ``data`` under ``--json``, else ``text``."""
    print(json.dumps(data, indent=2) if arguments.json else text)


def gibibytes(size: int) -> str:
    """A size in bytes for people; empty when unknown."""
    return f"{size / 2**30:.0f} GiB" if size else ""
