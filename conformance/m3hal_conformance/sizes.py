"""How large the suite's inputs are, by the device's kind. A claim says which sizes ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """name: what a case asks for by it. experts: resident ones of the 128 ids; context: tokens of a request, mostly."""

    name: str
    experts: int
    context: int

    def __str__(self) -> str:
        return f"{self.name}: up to {self.experts} resident experts, contexts of {self.context:,} tokens"


CPU, DEVICE = Sizes("cpu", 8, 4096), Sizes("device", 128, 65536)
#: by the kind of a device, as in ``cuda:sm_90``; every accelerator takes those of ``device``
SIZES: Mapping[str, Sizes] = {"cpu": CPU}


def sizes_of(device: str) -> Sizes:
    """The sizes that a device is asked about; those of ``cpu`` are asked everywhere."""
    return SIZES.get(device.partition(":")[0], DEVICE)
