"""One backend the way a user installs it: ``pip install`` of a project into a virtual environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

BUILD = """
import os, zipfile

INFO = "m3hal_acme-1.0.dist-info"
FILES = {
    f"{INFO}/METADATA": "Metadata-Version: 2.1\\nName: m3hal-acme\\nVersion: 1.0\\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\\nGenerator: toy\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    f"{INFO}/entry_points.txt": "[m3hal.backends]\\nacme = m3hal_acme:MANIFEST\\n",
    f"{INFO}/RECORD": "",
}

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "m3hal_acme-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in FILES.items():
            wheel.writestr(path, text)
        for file in sorted(os.listdir("m3hal_acme")):
            wheel.write(os.path.join("m3hal_acme", file))
    return name
"""
MANIFEST = """
from m3hal import Impl, Manifest

MANIFEST = Manifest(
    name="acme",
    vendor="toy",
    api=">=1,<2",
    devices=("cpu",),
    operators={"rms_norm": (Impl("m3hal_acme.norm:rms_norm"),)},
)
"""
SCRIPT = """
import json, sys
import m3hal

shape = m3hal.ModelShape.from_config(
    m3hal.MINIMAX_M3, dtype="bfloat16", page_size=128, max_tokens=64, max_seqs=4, max_context=1024)
plan = m3hal.plan(shape, "cpu", m3hal.Policy.resolve({"backend": "acme,reference"}))
chosen = plan.choice("rms_norm", "moe").chosen
print(json.dumps([plan.bind("rms_norm", "moe").run(), chosen.distribution, chosen.version, "torch" in sys.modules]))
"""


def test_pip_install_into_a_virtual_environment(tmp_path: Path) -> None:
    """A wheel built by pip from a source tree is found by name, distribution and version, and serves."""
    project = tmp_path / "acme"
    (project / "m3hal_acme").mkdir(parents=True)
    (project / "build_acme.py").write_text(BUILD)
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "build_acme"\nbackend-path = ["."]\n'
    )
    (project / "m3hal_acme" / "__init__.py").write_text(MANIFEST)
    (project / "m3hal_acme" / "norm.py").write_text("def rms_norm(site):\n    return lambda *inputs: 'acme ran'\n")

    venv = tmp_path / "venv"
    _run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", venv)
    # A venv made from a venv sees the base interpreter's packages, not this environment's; .pth files and all.
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    python = venv / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-build-isolation", "--no-deps", project)

    done = _run(python, "-c", SCRIPT)
    assert json.loads(done.stdout) == ["acme ran", "m3hal-acme", "1.0", False]


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("M3HAL_")}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environ, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done
