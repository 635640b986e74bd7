"""Whether this machine has the GPU that a plan is for, read from the kernel driver's topology."""

from __future__ import annotations

from pathlib import Path

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
KFD = Path("/dev/kfd")


def probe(device: str) -> str | None:
    """None when a GPU of the device's architecture (``hip:gfx950``) is visible, else the reason why it is not."""
    if not TOPOLOGY.is_dir():
        return "the amdgpu kernel driver is not loaded (no /sys/class/kfd); install it, or pick another backend"
    found = architectures()
    if not found:
        return "the amdgpu kernel driver sees no GPU; rocminfo tells more"
    if device.removeprefix("hip:") not in found:
        return f"this machine has {', '.join(sorted(found))}, not {device.removeprefix('hip:')}"
    if not KFD.exists():
        return "/dev/kfd is missing; start the container with --device /dev/kfd --device /dev/dri"
    return None


def architectures() -> set[str]:
    """Architectures of the GPUs in the topology, such as ``gfx950``; the CPU's own nodes have version 0."""
    versions = (_gfx_version(node / "properties") for node in TOPOLOGY.iterdir())
    return {f"gfx{v // 10000}{v // 100 % 100:x}{v % 100:x}" for v in versions if v}


def _gfx_version(properties: Path) -> int:
    """``gfx_target_version``: major * 10000 + minor * 100 + stepping, in decimal (90500 is gfx950)."""
    for line in properties.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "gfx_target_version":
            return int(value)
    return 0
