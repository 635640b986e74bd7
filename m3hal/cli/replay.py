"""Asks a backend a call that was recorded where a model ran; docs/captures.md says how.

    m3hal replay m3hal-captures/sparse_attention-model.layers.3.self_attn-000.pt --backend acme

Exits as `m3hal conform` does. The file is plain data; loading it runs no code.
"""

from __future__ import annotations

import argparse

from m3hal.cli.conform import suite
from m3hal.cli.output import emit

HELP = "ask a backend a recorded call"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The capture, and whom to ask."""
    parser.add_argument("file", metavar="FILE", help="what recording wrote")
    parser.add_argument("--backend", default="reference", help="whom to ask (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="as `m3hal devices` lists it (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Replays one file."""
    result = suite("m3hal_conformance.capture").replay(arguments.file, arguments.backend, arguments.device)
    failed = {check.name: check.sentence for check in result.failed}
    data = {"case": result.case, "status": result.status, "failed": failed, "reason": result.reason}
    text = "\n".join([f"{result.status}  {result.case}", *([result.sentence] if result.sentence else [])])
    emit(arguments, data, text)
    return {"pass": 0, "fail": 1}.get(result.status, 3)
