"""Lists the devices of this machine, under the names that plans use, without initialising any of them."""

from __future__ import annotations

import argparse

from m3hal.cli.output import emit, gibibytes
from m3hal.dispatch import devices
from m3hal.dispatch.table import table

HELP = "the devices of this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Always passes: there is a CPU."""
    found = devices.detect()
    rows = [(device.device, gibibytes(device.memory), device.source, device.label) for device in found]
    data = {"devices": [device.to_json() for device in found]}
    emit(arguments, data, table(("device", "memory", "found by", "name"), rows))
    return 0
