"""Devices of kinds that m3hal can't look for: named, listed, planned, asked and timed where torch has them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from m3hal_conformance import placing
from m3hal_conformance.command import device_of, named_device
from m3hal_conformance.vendor import ask, cases, check_asked

from m3hal import Impl, Manifest, ops
from m3hal.cli import main
from m3hal.dispatch import ConfigurationError, UnsupportedError, register, unregister
from m3hal.reference import bind_definition

HERE = Path(__file__).parent


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
    if placing.problem(device) is None:
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


MANIFEST = """
from m3hal import Impl, Manifest
rms_norm = Impl("m3hal_acme.norm:rms_norm", memory="self", files=("norm.py",))
MANIFEST = Manifest("acme", "toy", ">=1,<2", ("acme:*",), {"rms_norm": (rms_norm,)})
"""
NORM = """
import torch_acme
from m3hal import ops
from m3hal.reference import bind_definition

def rms_norm(site):
    return bind_definition(ops.load("rms_norm"), site)
"""


class Folder:
    """On PYTHONPATH: distributions, as files beside their ``dist-info``."""

    def __init__(self, path):
        self.path = path

    def write(self, name, entries, **files):
        package, info = self.path / name, self.path / f"{name}-1.0.dist-info"
        package.mkdir(exist_ok=True)
        info.mkdir()
        for module, text in files.items():
            (package / f"{module}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entries)

    def run(self, *arguments):
        """m3hal's exit code and all that it prints."""
        path = os.pathsep.join(filter(None, [str(self.path), os.environ.get("PYTHONPATH", "")]))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("M3HAL_")}
        command = [sys.executable, "-m", "m3hal", *arguments]
        done = subprocess.run(
            command, env={**environ, "PYTHONPATH": path}, cwd=self.path, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def vendor(tmp_path):
    """A backend whose factory's module imports a torch extension, which is not there yet."""
    folder = Folder(tmp_path)
    folder.write("m3hal_acme", "[m3hal.backends]\nacme = m3hal_acme:MANIFEST\n", __init__=MANIFEST, norm=NORM)
    return folder


@pytest.fixture(scope="module")
def torch_acme(tmp_path_factory):
    """A torch extension, compiled: PrivateUse1 over the host's memory."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("this machine has no C++ compiler")
    package = tmp_path_factory.mktemp("extension") / "torch_acme"
    shutil.copytree(HERE / "torch_acme", package, ignore=shutil.ignore_patterns("__pycache__"))
    root = Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    made = ["-o", package / "libacme.so", package / "acme.cpp", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run([compiler, "-O0", "-std=c++20", "-shared", "-fPIC", abi, *include, *made], check=True)
    return package


@pytest.fixture
def extension(vendor, torch_acme):
    """The backend beside the extension."""
    shutil.copytree(torch_acme, vendor.path / "torch_acme")
    return vendor


ASKED = ("--device", "acme:x1", "--case", "rms_norm/tokens_7", "--case", "rms_norm/no_token")


def test_extension_that_is_missing_is_told(vendor):
    """With the module that would have imported it; planning and listing need none."""
    code, told = vendor.run("conform", "--backend", "acme", *ASKED)
    assert code == 3
    assert "'acme', and importing m3hal_acme.norm raised ModuleNotFoundError: No module named 'torch_acme'" in told
    assert vendor.run("conform", "--backend", "acme", *ASKED, "--list")[0] == 0
    assert vendor.run("explain", "--device", "acme:x1", "--backend", "acme,reference")[0] == 0


def test_extension_that_a_factory_imports_brings_the_kind(extension):
    """The suite asks the backend on a device that torch itself doesn't have."""
    code, told = extension.run("conform", "--backend", "acme", *ASKED)
    assert code == 0, told
    assert "acme on acme:x1: 4 pass of 4 cases." in told
    assert "without --list they are measured on acme:x1" in extension.run("bench", *ASKED[:2], "--list")[1]


def test_extension_that_torch_loads_brings_the_kind(extension):
    """By its entry point in torch.backends: then every backend can be asked there, the reference too."""
    assert extension.run("conform", "--backend", "reference", *ASKED)[0] == 2
    extension.write("torch_acme", "[torch.backends]\nacme = torch_acme:_autoload\n")
    code, told = extension.run("conform", "--backend", "reference", *ASKED)
    assert code == 0, told
    assert "reference on acme:x1: 4 pass of 4 cases." in told
