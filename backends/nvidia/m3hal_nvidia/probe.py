"""Whether the software on this machine can use its NVIDIA GPU, asked without importing torch or opening the device."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

NVML = "libnvidia-ml.so.1"


def probe(device: str) -> str | None:
    """None when torch and the driver fit together, else the reason why ``device`` can't be used."""
    built_for = torch_cuda()
    if built_for is None:
        return "the installed torch is built without CUDA; install a CUDA build of torch"
    try:
        driver = driver_cuda()
    except OSError:
        return f"{NVML} is missing; install the NVIDIA driver, or start the container with docker run --gpus all"
    except RuntimeError as error:
        return f"the NVIDIA driver does not answer ({error}); nvidia-smi tells more"
    if driver < built_for:
        return (
            f"the installed torch is built for CUDA {built_for} but the driver supports CUDA {driver} at most; "
            f"update the driver, or install a torch for CUDA {driver}"
        )
    return None


def torch_cuda() -> int | None:
    """CUDA major version that the installed torch is built for; None for a CPU or ROCm build."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    version = Path(torch.origin).with_name("version.py")
    found = re.search(r"^cuda\b.*=\s*'(\d+)", version.read_text(), re.MULTILINE) if version.is_file() else None
    return int(found[1]) if found else None


def driver_cuda() -> int:
    """CUDA major version that the driver supports at most. NVML creates no CUDA context, so a later fork is safe.

    Raises OSError without the driver's library, RuntimeError when the library can't reach the driver.
    """
    nvml, version = ctypes.CDLL(NVML), ctypes.c_int()
    for function, arguments in (("nvmlInit_v2", ()), ("nvmlSystemGetCudaDriverVersion_v2", (ctypes.byref(version),))):
        code = getattr(nvml, function)(*arguments)
        if code:
            raise RuntimeError(f"{function} returned {code}")
    nvml.nvmlShutdown()
    return version.value // 1000
