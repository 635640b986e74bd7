"""Whether this machine has the GPU that a plan is for, asked without creating a context on it."""

from __future__ import annotations

import ctypes
from pathlib import Path

NVML = "libnvidia-ml.so.1"
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def probe(device: str) -> str | None:
    """None when a GPU of the device's architecture is visible, else the reason why it is not."""
    kind, _, architecture = device.partition(":")
    try:
        found = _amd() if kind == "hip" else _nvidia()
    except OSError as error:
        return f"no {kind} driver on this machine ({error}); install it, or start the container with its GPUs"
    if architecture not in found:
        return f"this machine has {', '.join(sorted(found)) or 'no GPU'}, not {architecture}"
    return None


def _nvidia() -> set[str]:
    """Architectures such as ``sm_90``. Raises OSError when the driver is missing or does not answer."""
    nvml = ctypes.CDLL(NVML)

    def call(function: str, *arguments: object) -> None:
        if code := getattr(nvml, function)(*arguments):
            raise OSError(f"{function} returned {code}")

    call("nvmlInit_v2")
    try:
        count, found = ctypes.c_uint(), set()
        call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
            found.add(f"sm_{major.value}{minor.value}")
        return found
    finally:
        nvml.nvmlShutdown()


def _amd() -> set[str]:
    """Architectures such as ``gfx950``, from the kernel driver's topology. Raises OSError without it."""
    found = set()
    for properties in sorted(KFD_NODES.iterdir()):
        for line in (properties / "properties").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "gfx_target_version" and int(value):
                version = int(value)
                found.add(f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    return found
