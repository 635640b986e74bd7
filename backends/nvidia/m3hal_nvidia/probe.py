"""Whether this machine has the GPU that a plan is for, asked of the driver without creating a CUDA context."""

from __future__ import annotations

import ctypes

NVML = "libnvidia-ml.so.1"


def probe(device: str) -> str | None:
    """None when a GPU of the device's architecture (``cuda:sm_90``) is visible, else the reason why it is not."""
    try:
        found = compute_capabilities()
    except OSError:
        return (
            f"{NVML} is not on this machine; install the NVIDIA driver, or start the container with its GPUs "
            "(docker run --gpus all)"
        )
    except RuntimeError as error:
        return f"the NVIDIA driver does not answer ({error}); nvidia-smi tells more"
    if not found:
        return "the NVIDIA driver sees no GPU; nvidia-smi tells more"
    if device.removeprefix("cuda:") not in found:
        return f"this machine has {', '.join(sorted(found))}, not {device.removeprefix('cuda:')}"
    return None


def compute_capabilities() -> set[str]:
    """Architectures of the GPUs that the driver manages, such as ``sm_90``.

    Raises OSError without the driver's library, RuntimeError when the library can't reach the driver.
    """
    nvml = ctypes.CDLL(NVML)
    _call(nvml, "nvmlInit_v2")
    try:
        count, found = ctypes.c_uint(), set()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            _call(nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
            found.add(f"sm_{major.value}{minor.value}")
        return found
    finally:
        _call(nvml, "nvmlShutdown")


def _call(nvml: ctypes.CDLL, function: str, *arguments: object) -> None:
    code = getattr(nvml, function)(*arguments)
    if code:
        raise RuntimeError(f"{function} returned {code}")
