"""Asks a backend a call that was recorded where a model ran; docs/captures.md says how.

    m3hal replay m3hal-captures/sparse_attention-model.layers.3.self_attn-000.pt --backend acme

Exits as `m3hal conform` does: 0 it passed, 1 it failed, 2 the file is no capture or a name means nothing, 3 the backend
or its implementation can't be asked here. The file is plain data; loading it runs no code.
"""

from __future__ import annotations

import argparse
import shlex

from m3hal.cli.conform import suite
from m3hal.cli.output import emit
from m3hal.dispatch import Policy
from m3hal.dispatch.discovery import REFERENCE
from m3hal.dispatch.errors import ConfigurationError

HELP = "ask a backend a recorded call"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The capture, and whom to ask."""
    parser.add_argument("file", metavar="FILE", help="what recording wrote")
    parser.add_argument("--backend", help="whom to ask; M3HAL_BACKEND when left out, else the reference")
    parser.add_argument("--device", help="as `m3hal devices` lists it; this machine's first when left out")


def run(arguments: argparse.Namespace) -> int:
    """Replays one file."""
    capture = suite("m3hal_conformance.capture")
    device = suite("m3hal_conformance.command").device_of(arguments.device, arguments.backend)
    backend = _backend(arguments.backend, device)
    result = capture.replay(arguments.file, backend, device)
    again = f"m3hal replay {shlex.quote(arguments.file)} --backend {backend} --device {device}"
    failed = {check.name: check.sentence for check in result.failed}
    asked_of = {"case": result.case, "backend": backend, "device": device, "impl_id": result.impl_id}
    outcome = {"status": result.status, "ratio": result.worst, "failed": failed, "reason": result.reason}
    by = "" if result.worst is None else f", worst error / bound {result.worst:.3g}"
    lines = [f"{result.status}  {result.case}  {backend} on {device}{by}"]
    lines += [f"  {', '.join(names)}: {sentence}" for names, sentence in result.faults]
    lines += [f"  {result.reason}"] if result.reason else []
    emit(arguments, {**asked_of, **outcome, "again": again}, "\n".join([*lines, f"  again: {again}"]))
    return {"pass": 0, "fail": 1}.get(result.status, 3)


def _backend(named: str | None, device: str) -> str:
    """Whom to ask: the option's, the policy's, or the reference where neither names one."""
    asked = named or Policy.resolve().on(device).backend
    if asked == "vllm" or named == "auto":
        raise ConfigurationError(f"replay asks one backend, and {asked!r} names none; `m3hal backends` lists them.")
    return REFERENCE if asked == "auto" else asked
