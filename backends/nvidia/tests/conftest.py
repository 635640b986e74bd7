"""FlashInfer's double, and copies of it with a difference."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from m3hal_conformance.doubles import DoubleRunner, standing_in

DOUBLE = Path(__file__).parent / "double"


@pytest.fixture(scope="module")
def runner() -> Iterator[DoubleRunner]:
    """Meets the adapters on the double, as on a B200."""
    with standing_in(DOUBLE, "flashinfer", "m3hal_nvidia"):
        yield DoubleRunner("nvidia", "cuda:sm_100")


@pytest.fixture
def edited(tmp_path: Path) -> Iterator[Callable[[str, str, str], None]]:
    """Installs a double in which ``old`` is ``new`` in one file."""
    with ExitStack() as stack:

        def install(file: str, old: str, new: str) -> None:
            shutil.copytree(DOUBLE, tmp_path / "double")
            path = tmp_path / "double" / "flashinfer" / file
            assert path.read_text().count(old) == 1, f"{old!r} must be in {file} once"
            path.write_text(path.read_text().replace(old, new))
            stack.enter_context(standing_in(tmp_path / "double", "flashinfer", "m3hal_nvidia"))

        yield install
