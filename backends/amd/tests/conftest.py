"""The double of aiter, and copies of it with a difference."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from m3hal_conformance.doubles import DoubleRunner, standing_in

DOUBLE = Path(__file__).parent / "double"

# The router has a Triton kernel; triton decides at import whether its own functions are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton")
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="module")
def runner() -> Iterator[DoubleRunner]:
    """Meets the adapters on the double, as on an MI350."""
    with standing_in(DOUBLE, "aiter", "m3hal_amd"):
        yield DoubleRunner("amd", "hip:gfx950")


@pytest.fixture
def edited(tmp_path: Path) -> Iterator[Callable[[str, str, str], None]]:
    """Installs a double in which ``old`` is ``new`` in one file."""
    with ExitStack() as stack:

        def install(file: str, old: str, new: str) -> None:
            shutil.copytree(DOUBLE, tmp_path / "double")
            path = tmp_path / "double" / "aiter" / file
            assert path.read_text().count(old) == 1, f"{old!r} must be in {file} once"
            path.write_text(path.read_text().replace(old, new))
            stack.enter_context(standing_in(tmp_path / "double", "aiter", "m3hal_amd"))

        yield install
