"""The published form works from another folder: wheels only, extras resolved, nothing of the checkout in sight."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from .conftest import HEAVY, ROOT, Environment, make_environment

DISTRIBUTIONS = {"m3hal", "m3hal_conformance", "m3hal_nvidia", "m3hal_amd", "m3hal_gaudi", "m3hal_triton"}


@pytest.fixture(scope="module")
def with_engine(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("with_engine"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("bare"), without=HEAVY)


def test_every_wheel_carries_its_marker_and_only_its_package(wheelhouse: Path) -> None:
    """One wheel per distribution: typed, licensed, under its own name."""
    wheels = {path.name.split("-")[0]: zipfile.ZipFile(path).namelist() for path in wheelhouse.glob("*.whl")}
    assert set(wheels) == DISTRIBUTIONS
    for package, names in wheels.items():
        assert f"{package}/py.typed" in names
        assert f"{package}-0.1.0.dist-info/licenses/LICENSE" in names
        assert all(name.startswith(package) for name in names), "a top-level name of another package"
    for package in ("m3hal_nvidia", "m3hal_amd", "m3hal_gaudi"):
        assert f"{package}/claims/contract.json" in wheels[package], "its levels would be lost"


def test_published_extras_resolve_and_work(wheelhouse: Path, with_engine: Environment) -> None:
    """`m3hal[vllm,conformance,nvidia]` from the wheelhouse: imports, command line and the plugin's entry point."""
    with_engine.pip_install("--find-links", wheelhouse, "m3hal[vllm,conformance,nvidia]")
    assert with_engine.run("m3hal", "--version").strip().endswith("0.1.0")
    assert "nvidia" in with_engine.run("m3hal", "backends")
    script = """if True:
        import importlib.metadata, sys, m3hal, m3hal.vllm, m3hal_conformance
        assert m3hal.__file__.startswith(sys.prefix), m3hal.__file__
        plugin, = importlib.metadata.entry_points(group="vllm.general_plugins", name="m3hal")
        assert plugin.load() is m3hal.vllm.register
        import torch; from m3hal.ops import load
        ones = load("rms_norm").reference(torch.ones(1, 4), torch.ones(4), eps=0.0, weight_offset=0.0)
        assert ones.tolist() == [[1.0] * 4]
    """
    with_engine.run("python", "-c", script)


def test_core_needs_only_stevedore(wheelhouse: Path, bare: Environment) -> None:
    """Without torch, vLLM or transformers: the command line plans for a device, and says why a vendor can't serve."""
    bare.pip_install("--find-links", wheelhouse, "m3hal[amd]")
    with pytest.raises(AssertionError, match="No module named 'torch'"):
        bare.run("python", "-c", "import torch")
    assert bare.run("m3hal", "--version").strip().endswith("0.1.0")
    assert "amd" in bare.run("m3hal", "backends")
    assert "rms_norm" in bare.run("m3hal", "ops")


def test_editable_install_without_engine(tmp_path: Path) -> None:
    """`pip install -e .` works on a machine without vLLM, and a second time over itself."""
    environment = make_environment(tmp_path, without=HEAVY)
    for _ in range(2):
        environment.pip_install("--no-build-isolation", "-e", ROOT)
    assert environment.run("m3hal", "--version").strip().endswith("0.1.0")
