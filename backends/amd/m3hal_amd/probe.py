"""Whether the software on this machine can use its AMD GPU, asked without importing torch or opening the device."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

KFD = Path("/dev/kfd")


def probe(device: str) -> str | None:
    """None when torch and the kernel driver are ready, else the reason why ``device`` can't be used."""
    if not torch_is_rocm():
        return "the installed torch is built without ROCm; install a ROCm build of torch"
    if not KFD.exists():
        return f"{KFD} is missing; start the container with --device /dev/kfd --device /dev/dri"
    if not os.access(KFD, os.R_OK | os.W_OK):
        return f"{KFD} may not be opened by this user; add the user to the groups render and video"
    if os.environ.get("AITER_TRITON_ONLY") == "1":  # aiter then leaves out the HIP kernels that the adapters call
        return "AITER_TRITON_ONLY=1 takes aiter's HIP kernels away; unset AITER_TRITON_ONLY, or deny amd"
    return None


def torch_is_rocm() -> bool:
    """Whether the installed torch is built for ROCm."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    version = Path(torch.origin).with_name("version.py")
    return version.is_file() and re.search(r"^hip\b.*=\s*'\d", version.read_text(), re.MULTILINE) is not None
