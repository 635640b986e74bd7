"""What `m3hal new-backend` writes is a backend that passes, and what it refuses it refuses in a sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from m3hal_conformance.results import read_waivers

from m3hal.cli import main


def test_written_backend_installs_and_passes_at_once(workplace: Any) -> None:
    """pip installs it, not in editable mode; discovery, its own tests and the suite find it, and every case passes."""
    code, output = workplace.shell("""
        m3hal new-backend acme
        pip install ./m3hal-acme
        rm -r m3hal-acme/m3hal_acme        # what runs is what was installed
        m3hal backends
        m3hal explain rms_norm --backend acme,reference --dtype fp32
        pytest -q m3hal-acme/tests
        m3hal conform --backend acme --op rms_norm --json claim.json
        m3hal claim verify claim.json
    """)
    assert code == 0, output
    assert "rms_norm at dense_attention, sparse_attention, dense_mlp, moe: acme" in output
    assert re.search(r"^\d+ passed", output, re.MULTILINE), output  # a failure would come first
    rows = json.loads((workplace.folder / "claim.json").read_text())["results"]
    assert {row["status"] for row in rows if not row["case"].startswith("rms_norm/captured/")} == {"pass"}


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The entry point leads to the manifest, the test file is no longer than twenty lines, no placeholder is left."""
    assert main(["new-backend", "acme", "--into", str(tmp_path)]) == 0
    root = tmp_path / "m3hal-acme"
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["m3hal.backends"] == {"acme": "m3hal_acme:MANIFEST"}
    assert len((root / "tests/test_conformance.py").read_text().splitlines()) <= 20
    files = [path for path in root.rglob("*") if path.suffix in (".py", ".toml", ".md", ".yml")]
    assert len(files) == 8
    assert read_waivers(root / "waivers.toml", ()) == ()  # what the CI job names is there, and can be read
    assert not [path for path in files if "NAME" in path.read_text()]
    assert "m3hal conform --backend acme" in capsys.readouterr().out


def test_files_meet_the_linter(tmp_path: Path) -> None:
    """A vendor who lints has nothing to repair."""
    pytest.importorskip("ruff", reason="ruff is a tool of developers; pip install 'm3hal[dev]'")
    assert main(["new-backend", "acme_9", "--into", str(tmp_path)]) == 0
    for command in (["check", "--select", "E,F,W,I,UP,B"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--line-length", "120", "--isolated", "."]
        done = subprocess.run(ruff, cwd=tmp_path / "m3hal-acme_9", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_manifest_imports_no_torch(tmp_path: Path) -> None:
    """The manifest that is written can be read without torch."""
    assert main(["new-backend", "acme", "--into", str(tmp_path)]) == 0
    code = "import sys, m3hal_acme; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "m3hal-acme", check=True)


def test_ci_job_works_on_day_one(tmp_path: Path) -> None:
    """Files that its commands read are written, no command asks the cases twice, and none needs a claim."""
    assert main(["new-backend", "acme", "--into", str(tmp_path)]) == 0
    root = tmp_path / "m3hal-acme"
    job = (root / ".github/workflows/conformance.yml").read_text()
    assert all((root / name).is_file() for name in re.findall(r"--waivers (\S+)", job))
    assert job.count("m3hal conform ") == 1
    assert "run: pytest" not in job
    assert "claim verify" not in job


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is there, and a name that can't be one, are refused with exit code 2."""
    assert main(["new-backend", "acme", "--into", str(tmp_path)]) == 0
    assert main(["new-backend", "acme", "--into", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    for name in ("Acme", "auto", "reference", "a-b", "../x", "class"):
        assert main(["new-backend", name, "--into", str(tmp_path)]) == 2


@pytest.mark.parametrize(("name", "into"), [("acme", "file"), ("a" * 300, ".")])
def test_what_cannot_be_written_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, into: str
) -> None:
    """A file for a folder, a name that is too long: 2."""
    (tmp_path / "file").touch()
    assert main(["new-backend", name, "--into", str(tmp_path / into)]) == 2
    assert "can't be written" in capsys.readouterr().err
