"""Fetches the vendors' wheels whose sources tests read into ``.cache/wheels``: FlashInfer's newest in range.

    python scripts/vendor_wheels.py

Nothing is installed, and nothing of a wheel is imported. aiter and Habana's bridge are in no package index; their
signatures are recorded in the packages, with links.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".cache" / "wheels"


def main() -> int:
    """Exits as pip does."""
    from m3hal_nvidia.manifest import MANIFEST

    name = "flashinfer-python"
    wanted = f"{name}{MANIFEST.libraries[name]}"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    return subprocess.run([*pip, "-d", str(FOLDER), wanted]).returncode


if __name__ == "__main__":
    sys.exit(main())
