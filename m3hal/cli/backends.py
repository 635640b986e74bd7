"""Lists the installed backends, the libraries that each calls and whether it is usable here, or on another device.

Of a library stand the installed version and the range that the backend was written for. Exits with 3 when none is
usable.
"""

from __future__ import annotations

import argparse
from typing import Any

from m3hal import ops
from m3hal.cli.output import emit
from m3hal.dispatch import devices
from m3hal.dispatch.check import unknown_operators
from m3hal.dispatch.discovery import Found, discover
from m3hal.dispatch.libraries import libraries
from m3hal.dispatch.screen import screen_backend
from m3hal.dispatch.table import table

HELP = "installed backends, and whether they are usable here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The device to look at."""
    parser.add_argument("--device", help="judge for this device, e.g. hip:gfx950, instead of this machine's")


def run(arguments: argparse.Namespace) -> int:
    """Passes when a backend is usable."""
    asked = [devices.check(arguments.device)] if arguments.device else _here()
    rows = [_row(found, asked) for found in discover()]
    text = table(
        ("backend", "distribution", "priority", "operators", "libraries", "verdict"),
        [
            (r["name"], f"{r['distribution']} {r['version']}", r["priority"], r["operators"], r["needs"], r["summary"])
            for r in rows
        ],
    )
    data = [{key: value for key, value in row.items() if key != "needs"} for row in rows]
    emit(arguments, {"devices": asked, "backends": data}, f"on {', '.join(asked)}\n{text}")
    return 0 if any(row["usable_on"] for row in rows) else 3


def _here() -> list[str]:
    return list(dict.fromkeys(found.device for found in devices.detect()))


def _row(found: Found, asked: list[str]) -> dict[str, Any]:
    judged = [screen_backend(found, device, devices.is_present(device)) for device in asked]
    usable = [device for device, result in zip(asked, judged, strict=True) if result.is_usable]
    verdicts = {device: r.verdict.to_json() for device, r in zip(asked, judged, strict=True) if r.verdict}
    # Of several rejections the one that came furthest says most.
    rejected = [result.verdict for result in judged if result.verdict and not result.is_usable]
    last = next((verdict for verdict in rejected if verdict.stage != "device"), rejected[0] if rejected else None)
    manifest = found.manifest
    served = len([name for name in manifest.operators if name in ops.NAMES]) if manifest else 0
    summary = f"usable on {', '.join(usable)}" if usable else f"rejected at {last.stage}: {last.reason}" if last else ""
    faults = [problem for _, problem in unknown_operators(manifest)] if manifest else []
    return {
        "name": found.name,
        "distribution": found.distribution,
        "version": found.version,
        "target": found.target,
        "vendor": manifest.vendor if manifest else "",
        "devices": list(manifest.devices) if manifest else [],
        "priority": manifest.priority if manifest else "",
        "operators": served,
        "libraries": [library.to_json() for library in libraries(manifest)],
        "needs": ", ".join(map(str, libraries(manifest))),
        "usable_on": usable,
        "verdicts": verdicts,
        "faults": faults,
        "summary": "; ".join([summary, *faults]),
    }
