""".ci/run ends as pytest did: its exit code, and its closing line last."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT


@pytest.mark.parametrize(
    ("closing", "code"),
    [
        ("===== 3 passed, 1 skipped in 2.00s =====", 0),
        ("===== 1 failed, 2 passed in 2.00s =====", 1),
        ("===== no tests ran in 0.10s =====", 5),
    ],
)
def test_ends_as_pytest_did(tmp_path: Path, closing: str, code: int) -> None:
    """Make turns every failure into 2 and prints after pytest; .ci/run undoes both. Its environment is new."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    lines = ["test:", '\t@test ! -e "$(VENV)"', f"\t@echo '{closing}'; exit {code}", ""]
    (tmp_path / "Makefile").write_text("\n".join(lines))
    done = subprocess.run([tmp_path / ".ci" / "run"], cwd=tmp_path.parent, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, closing)


def test_setup_that_fails_is_a_failure(tmp_path: Path) -> None:
    """Without any test run there is no closing line to show, and the exit code is not 0."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text("test: absent\n")
    assert subprocess.run([tmp_path / ".ci" / "run"], cwd=tmp_path, capture_output=True).returncode == 1
