"""Fetches the wheels that tests read into ``.cache/wheels``: FlashInfer's newest in range, vLLM 0.33 and triton 3.6.

    python scripts/vendor_wheels.py

Nothing is installed. FlashInfer's wheel is read without importing it; of vLLM's, which has no build for CPUs, one test
runs the Python; triton 3.6 compiles kernels from where a test unpacks it. A wheel that is there is not fetched again;
vLLM's has 336 MB, triton's 188. aiter and Habana's bridge are in no package index; their signatures are recorded in the
packages, with links.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".cache" / "wheels"
VLLM = "vllm==0.33.0"  # which tests/vllm/vllm_0_33.json records
TRITON = "triton==3.6.*"  # the oldest in range, which compiles less than later ones


def main() -> int:
    """Exits as pip does; it fetches nothing when one of them can't be had."""
    from m3hal_nvidia.manifest import MANIFEST

    name = "flashinfer-python"
    wanted = [f"{name}{MANIFEST.libraries[name]}", VLLM, TRITON]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    return subprocess.run([*pip, "-d", str(FOLDER), *wanted]).returncode


if __name__ == "__main__":
    sys.exit(main())
