"""Whether the software on this machine can use its Gaudi, asked without importing torch or opening the device."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

NODES = Path("/dev/accel")


def probe(device: str) -> str | None:
    """None when the driver and Intel's torch bridge are ready, else the reason why ``device`` can't be used."""
    if importlib.util.find_spec("habana_frameworks") is None:
        return "Intel's torch bridge (habana_frameworks) is missing; install it with habanalabs-installer.sh"
    nodes = sorted(NODES.glob("accel[0-9]*"))
    if not nodes:
        return f"{NODES} has no card; load the driver (modprobe habanalabs), or run docker with --runtime=habana"
    if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return f"no card under {NODES} may be opened by this user; add the user to the cards' group"
    return None
