"""The whole tree is clean by ruff and by mypy --strict, as `make lint` checks them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("tool", ["ruff check", "ruff format --check --diff", "mypy"])
def test_tree_is_clean(tool: str) -> None:
    """No finding; the configuration stands in pyproject.toml."""
    done = subprocess.run([sys.executable, "-m", *tool.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
