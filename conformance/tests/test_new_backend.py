"""What `m3hal new-backend` writes is a backend that passes, and what it refuses it refuses in a sentence."""

import subprocess
import sys
import tomllib

from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal.cli import main
from m3hal.dispatch import register, unregister


def test_written_backend_passes_at_once(tmp_path, monkeypatch, capsys):
    """Manifest, probe and operator work as they are written; the entry point leads to the manifest."""
    assert main(["new-backend", "acme", "--into", str(tmp_path)]) == 0
    root = tmp_path / "m3hal-acme"
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["m3hal.backends"] == {"acme": "m3hal_acme:MANIFEST"}
    assert len((root / "tests/test_conformance.py").read_text().splitlines()) <= 20
    monkeypatch.syspath_prepend(str(root))
    import m3hal_acme

    register(m3hal_acme.MANIFEST)
    try:
        results = Runner("acme", "cpu").run(select(operators=["rms_norm"], quick=True))
    finally:
        unregister("acme")
    assert {result.status for result in results} == {"pass"}
    assert not any(
        "NAME" in path.read_text() for path in root.rglob("*") if path.suffix in (".py", ".toml", ".md", ".yml")
    )


def test_manifest_imports_no_torch(tmp_path):
    """The manifest that is written can be read without torch."""
    assert main(["new-backend", "acme", "--into", str(tmp_path)]) == 0
    code = "import sys, m3hal_acme; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "m3hal-acme", check=True)


def test_refusals(tmp_path, capsys):
    """A folder that is there, and a name that can't be one, are refused with exit code 2."""
    assert main(["new-backend", "acme", "--into", str(tmp_path)]) == 0
    assert main(["new-backend", "acme", "--into", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    for name in ("Acme", "auto", "reference", "a-b", "../x"):
        assert main(["new-backend", name, "--into", str(tmp_path)]) == 2
