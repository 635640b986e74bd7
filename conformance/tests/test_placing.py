"""Devices of kinds that m3hal can't look for: named, listed, planned, asked and timed where torch has them."""

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from m3hal_conformance import placing
from m3hal_conformance.command import device_of, named_device
from m3hal_conformance.vendor import ask, cases, check_asked

from m3hal import Impl, Manifest, ops
from m3hal.cli import main
from m3hal.dispatch import ConfigurationError, UnsupportedError, register, unregister
from m3hal.reference import bind_definition


def defined(site):
    return bind_definition(ops.load("rms_norm"), site)


@pytest.fixture
def acme(monkeypatch):
    """A backend of this process for devices of the kind ``acme``; the definition computes."""
    monkeypatch.setitem(sys.modules, "m3hal_toy", SimpleNamespace(defined=defined, __spec__=None))
    rms_norm = Impl("m3hal_toy:defined", memory="self")
    register(Manifest("acme", "toy", ">=1,<2", ("acme:*",), {"rms_norm": (rms_norm,)}, priority=-1))
    yield
    unregister("acme")


@pytest.fixture
def on_cpu(monkeypatch):
    """torch's ``acme`` is the CPU: what an extension would bring, without one."""
    monkeypatch.setitem(placing._IN_TORCH, "acme", "cpu")


def test_kinds_of_manifests_and_of_torch_are_devices(acme):
    """A manifest's kind, torch's own, and what m3hal looks for; none of them need be here to be named."""
    for device in ("acme:x1", "acme", "xpu:bmg", "hpu:gaudi2", "cuda:sm_90", "cpu"):
        assert named_device(device) == device
    assert device_of("acme:x1", "acme") == "acme:x1"


def test_kind_that_nobody_names_is_refused(acme):
    """With the known ones, how a manifest names one, and what was meant."""
    with pytest.raises(ConfigurationError, match=r"names: cpu, cuda, hip, hpu, acme\. .*devices=\('npu:\*',\)"):
        named_device("npu:ascend910", "acme,reference")
    with pytest.raises(ConfigurationError, match="Did you mean 'cuda:sm_90'"):
        named_device("gpu:sm_90")


def test_cases_and_rows_are_listed_without_the_device(acme, capsys):
    """Neither plans, probes or asks torch for the device."""
    assert main(["conform", "--backend", "acme", "--device", "acme:x1", "--op", "rms_norm", "--list"]) == 0
    assert "rms_norm/no_token/bfloat16" in capsys.readouterr().out.splitlines()
    options = ["bench", "--device", "acme:x1", "--op", "rms_norm", "--list"]
    assert main(options) == 0
    assert capsys.readouterr().out.endswith("of published sizes; measuring needs acme:x1, which this machine lacks.\n")
    assert main([*options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_here"] is False


@pytest.mark.parametrize("command", ["conform", "bench"])
def test_device_that_torch_lacks_is_one_sentence(acme, capsys, command):
    """Not a failure per case: what is missing, who brings it, and where that is written."""
    assert main([command, "--backend", "acme", "--device", "acme:x1", "--op", "rms_norm"]) == 3
    told = capsys.readouterr().err
    assert told.startswith("m3hal: torch can't put tensors on acme:x1 here: torch has no kind of device called 'acme'.")
    assert "entry point in torch.backends" in told
    with pytest.raises(UnsupportedError, match="torch can't put tensors on acme:x1 here"):
        check_asked("acme", "acme:x1", ["rms_norm"])


@pytest.mark.parametrize(("device", "why"), [("xpu:bmg", "XPU"), ("meta", "no data")])
def test_kind_without_tensors_is_one_sentence(device, why):
    """torch has names for devices that it was built without, and one that keeps no numbers."""
    if placing.is_here(device):
        pytest.skip(f"this machine has {device}")
    with pytest.raises(UnsupportedError, match=rf"can't put tensors on {device} here: .*{why}"):
        placing.check(device)


def test_backend_of_another_kind_says_so_first(acme, capsys):
    """Whether the device is here matters only to a backend that is for it."""
    assert main(["conform", "--backend", "acme", "--device", "xpu:bmg", "--op", "rms_norm"]) == 3
    assert "it runs on acme:*; not on xpu:bmg" in capsys.readouterr().err


def test_cases_are_asked_on_the_device(acme, on_cpu, capsys):
    """Where torch can put tensors there, the suite runs and names the device by m3hal's name, and so do test files."""
    case = "rms_norm/tokens_7/bfloat16"
    assert main(["conform", "--backend", "acme", "--device", "acme:x1", "--case", case]) == 0
    assert "acme on acme:x1: 1 pass of 1 cases." in capsys.readouterr().out
    (question,) = [question for question in cases(operators=["rms_norm"]) if str(question) == case]
    ask("acme", question, device="acme:x1")


def test_rows_are_timed_on_the_device(acme, on_cpu, capsys):
    """By the clock of the host."""
    options = ["--backend", "acme", "--device", "acme:x1", "--op", "rms_norm", "--small", "--runs", "5", "--json"]
    assert main(["bench", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["status"] for row in told["rows"]} == {"measured"}


EXTENSION = """
import torch
torch.utils.rename_privateuse1_backend("acme")
"""
SCRIPT = """
import json
from m3hal_conformance import placing
from m3hal_conformance.command import named_device
before = [named_device("acme:x1", "acme"), placing.is_kind_of_torch("acme:x1")]
why = placing.problem("acme:x1", ["m3hal_acme.extension"])
print(json.dumps([*before, placing.is_kind_of_torch("acme:x1"), str(placing.torch_device("acme:x1")), why]))
"""


def test_extension_that_a_factory_imports_brings_the_kind(tmp_path):
    """torch's PrivateUse1, renamed as extensions do. Named before that is loaded; it has no kernels, which is told."""
    package, info = tmp_path / "m3hal_acme", tmp_path / "m3hal_acme-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    manifest = 'MANIFEST = Manifest("acme", "toy", ">=1,<2", ("acme:*",), {})'
    (package / "__init__.py").write_text(f"from m3hal import Manifest\n{manifest}\n")
    (package / "extension.py").write_text(EXTENSION)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: m3hal-acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[m3hal.backends]\nacme = m3hal_acme:MANIFEST\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named, before, after, device, why = json.loads(done.stdout.splitlines()[-1])
    assert (named, before, after, device) == ("acme:x1", False, True, "acme")
    assert why
    assert "no kind of device" not in why
