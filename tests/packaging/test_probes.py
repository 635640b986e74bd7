"""The vendors' probes: a reason that a person can act on, from a machine made of files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from m3hal_amd import probe as amd
from m3hal_gaudi import probe as gaudi
from m3hal_nvidia import probe as nvidia


def fake_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, **built: str) -> None:
    """The probes find a torch that only has a version.py; importing it is not possible."""
    lines = [f"{name}: Optional[str] = {built.get(name)!r}\n" for name in ("cuda", "hip")]
    (folder / "version.py").write_text("".join(lines))
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_nvidia_says_when_torch_has_no_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch is the most common reason on a machine that has the GPU."""
    fake_torch(tmp_path, monkeypatch)
    assert "without CUDA" in str(nvidia.probe("cuda:sm_90"))


@pytest.mark.parametrize(("driver", "reason"), [(12, "CUDA 12 at most"), (13, None), (14, None)])
def test_nvidia_compares_driver_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: int, reason: str | None
) -> None:
    """A driver of an older CUDA major version than torch's can't run it; the same or a newer one can."""
    fake_torch(tmp_path, monkeypatch, cuda="13.0")
    monkeypatch.setattr(nvidia, "driver_cuda", lambda: driver)
    found = nvidia.probe("cuda:sm_90")
    assert found is None if reason is None else reason in str(found)


def test_nvidia_without_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver library: the reason names it and the container's flag."""
    fake_torch(tmp_path, monkeypatch, cuda="13.0")
    monkeypatch.setattr(nvidia, "NVML", "libnvidia-ml-that-is-not-there.so.1")
    assert "--gpus all" in str(nvidia.probe("cuda:sm_90"))


def test_amd_asks_torch_then_the_device_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build of torch, then /dev/kfd, then usable."""
    monkeypatch.setattr(amd, "KFD", tmp_path / "kfd")
    fake_torch(tmp_path, monkeypatch, hip="7.2.0")
    assert "--device" in str(amd.probe("hip:gfx950"))
    (tmp_path / "kfd").touch()
    assert amd.probe("hip:gfx950") is None
    monkeypatch.setenv("AITER_TRITON_ONLY", "1")
    assert "unset AITER_TRITON_ONLY" in str(amd.probe("hip:gfx950"))
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    assert "without ROCm" in str(amd.probe("hip:gfx950"))


def test_gaudi_asks_the_bridge_then_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intel's torch bridge, then the driver's device files, then usable."""
    monkeypatch.setattr(gaudi, "NODES", tmp_path / "accel")
    assert "habana_frameworks" in str(gaudi.probe("hpu:gaudi2"))
    (tmp_path / "habana_frameworks").mkdir()
    (tmp_path / "habana_frameworks" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert "modprobe" in str(gaudi.probe("hpu:gaudi2"))
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel" / "accel0").touch()
    assert gaudi.probe("hpu:gaudi2") is None


@pytest.mark.parametrize("name", ["nvidia", "amd", "gaudi"])
def test_manifest_and_probe_import_no_vendor(name: str) -> None:
    """Reading a manifest and running its probe imports neither torch nor a vendor's library."""
    code = f"""if True:
        import sys
        from m3hal_{name}.manifest import MANIFEST
        from m3hal_{name}.probe import probe
        assert MANIFEST.probe == "m3hal_{name}.probe:probe" and MANIFEST.operators
        probe(MANIFEST.devices[0])
        assert not {{"torch", "flashinfer", "aiter", "habana_frameworks"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
