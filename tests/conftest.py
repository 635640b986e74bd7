"""An environment to install into and to throw away, which has all that this one has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# What a shell starts in the background ignores SIGINT, and so would the commands that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: what pip would fetch is here already, and no test reaches an index
OFFLINE = "--no-index --no-deps --no-build-isolation --quiet --disable-pip-version-check"


@dataclass(frozen=True)
class Workplace:
    """An empty folder whose shell has ``m3hal``, ``pip``, ``pytest`` and ``python`` of a virtual environment.

    It sees this environment's packages; what is installed into it, this environment does not see.
    """

    folder: Path
    programs: Path

    def shell(self, script: str) -> tuple[int, str]:
        """(exit code, output) of a script that ends at its first failure."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("M3HAL_", "PIP_"))}
        path = f"{self.programs}{os.pathsep}{clean['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env={**clean, "PATH": path, "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    """Made anew for each test."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    here = sysconfig.get_paths()["purelib"]
    (packages / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    programs, work = environment / "bin", tmp_path / "work"
    write = _writer(programs)
    write("m3hal", '-m m3hal "$@"')
    write("pytest", '-m pytest -p no:cacheprovider "$@"')
    write("pip", f'-m pip "$@" {OFFLINE}')
    work.mkdir()
    return Workplace(work, programs)


def _writer(programs: Path) -> Callable[[str, str], None]:
    def write(name: str, arguments: str) -> None:
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{programs}/python" {arguments}\n')
        program.chmod(0o755)

    return write
