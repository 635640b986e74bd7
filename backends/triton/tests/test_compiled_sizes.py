"""Attention and the indexer compile for every block and page size of their limits, with the oldest triton too."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CACHE = HERE.parents[2] / ".cache" / "wheels"
#: the triton of torch 2.11; None: the installed one
VERSIONS = pytest.mark.parametrize("version", ["3.6", None], ids=["oldest", "installed"])


@pytest.mark.slow
@VERSIONS
def test_every_size_compiles(version, tmp_path):
    """Blocks of several pages, pages of several blocks, every cache format, decode, verify and prefill."""
    paths = [str(HERE)]
    if version is not None:
        wheels = sorted(CACHE.glob(f"triton-{version}.*-cp{sys.version_info[0]}{sys.version_info[1]}-*.whl"))
        if not wheels:
            pytest.skip(f"no wheel of triton {version} in .cache/wheels; `python scripts/vendor_wheels.py` fetches it")
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(tmp_path)
        for tool in (tmp_path / "triton" / "backends" / "nvidia" / "bin").iterdir():
            tool.chmod(0o755)  # extractall drops it
        paths.insert(0, str(tmp_path))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "compile_sizes.py"), "sm_90"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
    assert version is None or f"with triton {version}" in ended.stdout
