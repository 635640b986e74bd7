"""Devices by name, and looking for them without touching them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m3hal.dispatch import devices
from m3hal.dispatch.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _fresh() -> None:
    devices.detect.cache_clear()


def tool(folder: Path, name: str, text: str, code: int = 0) -> None:
    """An executable that prints a text."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    path.chmod(0o755)


def test_nvidia_cards_by_compute_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi's rows become cuda:sm_NN with memory in bytes; the CPU comes last."""
    tool(tmp_path, "nvidia-smi", "9.0, NVIDIA H200, 143771\n10.0, NVIDIA B200, 183359")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = devices.detect()
    assert [device.device for device in found][:2] == ["cuda:sm_90", "cuda:sm_100"]
    assert found[0].memory == 143771 << 20
    assert found[-1].device == "cpu"
    assert devices.is_present("cuda:sm_90")
    assert not devices.is_present("cuda:sm_103")


def test_failing_tool_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that doesn't answer is no device, and no crash."""
    tool(tmp_path, "nvidia-smi", "NVIDIA-SMI has failed because it couldn't communicate with the driver", code=9)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert not devices._cuda()


def test_amd_cards_from_the_kernel_driver(tmp_path: Path) -> None:
    """KFD nodes with a gfx_target_version are GPUs, 90500 is gfx950 and 90402 gfx942; CPU nodes are not."""
    for number, version in enumerate((0, 90500, 90402, 90010)):
        bank = tmp_path / str(number) / "mem_banks" / "0"
        bank.mkdir(parents=True)
        (tmp_path / str(number) / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")
        (tmp_path / str(number) / "name").write_text("ip discovery\n")
        (bank / "properties").write_text("heap_type 1\nsize_in_bytes 309220868096\n")
    found = devices._hip(tmp_path)
    assert [device.device for device in found] == ["hip:gfx950", "hip:gfx942", "hip:gfx90a"]
    assert found[0].memory == 309220868096


def test_gaudi_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's device_type where it exists, else the board number that hl-smi reports."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    node = tmp_path / "accel" / "accel0" / "device"
    node.mkdir(parents=True)
    (node / "device_type").write_text("GAUDI2\n")
    assert [device.device for device in devices._hpu(tmp_path / "accel")] == ["hpu:gaudi2"]
    tool(tmp_path, "hl-smi", "HL-225, 98304 MiB\nHL-325L, 131072 MiB\nHL-205, 32768 MiB")
    found = devices._hpu(tmp_path / "nowhere")
    assert [device.device for device in found] == ["hpu:gaudi2", "hpu:gaudi3", "hpu:gaudi"]
    assert found[0].memory == 98304 << 20


def test_unknown_kinds_are_their_probes_business() -> None:
    """m3hal can't look for a device it has never heard of, so it counts as present."""
    assert devices.is_present("npu:ascend910")
    assert devices.is_present("cpu")


@pytest.mark.parametrize(
    ("device", "pattern", "is_one"),
    [
        ("acme", "acme:*", True),
        ("acme", "acme", True),
        ("acme", "*", True),
        ("acme", "acme:x1", False),
        ("acme", "acme:x*", False),
        ("acme", "acm:*", False),
        ("acme:x1", "acme:*", True),
        ("acme:x1", "acme", False),
        ("cuda:sm_90", "cuda:sm_9*", True),
    ],
)
def test_bare_kind_is_matched_by_what_asks_no_architecture(device: str, pattern: str, is_one: bool) -> None:
    """vLLM tells an unknown platform's kind alone, and a backend for every device of that kind is meant by it."""
    assert devices.matches(device, (pattern,)) is is_one


@pytest.mark.parametrize(
    ("name", "remedy"), [("cuda", "cuda:sm_90"), ("hip", "hip:gfx950"), ("sm 90", "kind:architecture"), ("", "'cpu'")]
)
def test_what_is_no_device_is_refused_with_an_example(name: str, remedy: str) -> None:
    """An accelerator needs its architecture."""
    with pytest.raises(ConfigurationError, match=remedy):
        devices.check(name)


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("cuda:sm90", "cuda:sm_90"),
        ("cuda:sm_90a", "cuda:sm_90"),
        ("cuda:100", "cuda:sm_100"),
        ("cuda:9.0", "cuda:sm_90"),
        ("cuda:hopper", "cuda:sm_90"),
        ("hip:gfx_942", "hip:gfx942"),
        ("hip:950", "hip:gfx950"),
        ("hpu:gaudi-3", "hpu:gaudi3"),
        ("cpu:0", "cpu"),
    ],
)
def test_an_architecture_by_another_name_is_refused_with_the_one_meant(slip: str, meant: str) -> None:
    """No backend would be for it, and the plan would say that of a device which has one."""
    with pytest.raises(ConfigurationError, match=f"'{slip}' is no device. Did you mean '{meant}'?"):
        devices.check(slip)
    assert devices.check(meant) == meant


@pytest.mark.parametrize("name", ["xpu:bmg", "npu:ascend910", "acme:x1"])
def test_other_kinds_name_their_architectures_themselves(name: str) -> None:
    """Kinds that m3hal can't look for are no slips of those that it can."""
    assert devices.check(name) == name
    assert devices.meant(name) is None


def test_patterns() -> None:
    """Manifests name devices by shell patterns."""
    assert devices.matches("hip:gfx950", ("hip:gfx95*",))
    assert devices.matches("cpu", ("*",))
    assert not devices.matches("cuda:sm_100", ("cuda:sm_10",))


def test_looking_imports_no_torch() -> None:
    """Detection works where torch is not installed, and initialises nothing."""
    script = "import sys; from m3hal.dispatch import devices; devices.detect(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
