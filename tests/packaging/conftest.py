"""Environments that hold this one's libraries and no m3hal, so that installing it is tried for real, and offline."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = (".", "./conformance", "./backends/nvidia", "./backends/amd", "./backends/gaudi", "./backends/triton")
HEAVY = ("torch*", "vllm*", "transformers*", "functorch*", "triton*")


@dataclass(frozen=True)
class Environment:
    """A virtual environment and an empty folder to work in."""

    folder: Path
    cwd: Path

    def pip_install(self, *arguments: str | Path) -> None:
        """pip install without any index."""
        python = self.folder / "bin" / "python"
        _run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", *arguments], self.cwd)

    def run(self, program: str, *arguments: str | Path) -> str:
        """What one of its programs prints."""
        return _run([self.folder / "bin" / program, *arguments], self.cwd)


def make_environment(folder: Path, without: tuple[str, ...] = ()) -> Environment:
    """A new environment with links to the libraries installed here, except m3hal's own and those named."""
    _run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder.parent)
    (target,) = (folder / "venv" / "lib").glob("python*/site-packages")
    hidden = ("m3hal*", "_m3hal*", "*.pth", "pip", "pip-*", "__pycache__", *without)
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not any(fnmatch.fnmatch(entry.name.lower(), pattern) for pattern in hidden):
            (target / entry.name).symlink_to(entry)
    (folder / "elsewhere").mkdir()
    return Environment(folder / "venv", folder / "elsewhere")


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of every distribution, built as `make wheelhouse` builds them."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    _run([*build, "-w", folder, *PROJECTS], ROOT)
    return folder


def _run(command: list[str | Path], cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout
