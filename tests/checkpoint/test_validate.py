"""The validator: passes what the converter writes, finds every kind of fault, and shares nothing with the converter."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import m3hal.checkpoint.validate
from m3hal.checkpoint.convert import GAUDI2, HOPPER, convert
from m3hal.checkpoint.validate import Kind, checks, self_test, tables, validate
from m3hal.checkpoint.validate.reader import Folder
from m3hal.checkpoint.validate.selftest import CORRUPTIONS
from m3hal.cli import main

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.1."


@pytest.fixture(scope="module", params=[GAUDI2, HOPPER], ids=lambda profile: profile.name)
def converted(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint, converted."""
    return convert(source, tmp_path_factory.mktemp("converted") / "fp8", request.param).target


@pytest.fixture
def broken(converted: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(converted, tmp_path / "broken"))


def poke(folder: Path, name: str, offset: int, value: bytes) -> None:
    """Overwrites some bytes of a tensor."""
    view = Folder(folder).tensors[name]
    with view.file.open("r+b") as file:
        file.seek((view.begin if offset >= 0 else view.end) + offset)
        file.write(value)


def test_what_the_converter_writes_is_valid(converted: Path, source: Path) -> None:
    """All of it, with any number of threads; a sample compares as many matrices as asked."""
    verdict = validate(converted, source, workers=3)
    assert (verdict.exit_code, verdict.faults) == (0, ())
    assert verdict.compared == verdict.experts == 2 * 3 * 3
    assert validate(converted, source, sample=4).compared == 4


def test_every_corruption_of_the_self_test_is_found(converted: Path, source: Path) -> None:
    """At least ten ways, of every class of fault, each by its own exit code; the untouched copy passes."""
    rows = list(self_test(converted, source))
    assert [(kind or 0, name) for name, kind, _ in rows] == [(code, name) for name, _, code in rows]
    assert len(rows) > 10
    assert {kind for _, kind, _ in CORRUPTIONS} == set(Kind)


def test_a_self_test_that_misses_one_fails(
    converted: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A validator that no longer compares numbers is found out by its own self-test."""
    monkeypatch.setattr(checks, "_elements", lambda *_: [])
    assert main(["validate", str(converted), "--source", str(source), "--self-test"]) == 1
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.parametrize("row", [0, 63])
def test_one_wrong_element_anywhere(broken: Path, source: Path, row: int) -> None:
    """Found by a full comparison, named by row and column; all other tensors are as before."""
    columns = Folder(broken).tensors[EXPERT + "w1.weight"].shape[1]
    poke(broken, EXPERT + "w1.weight", row * columns + 3, b"\x38")
    poke(broken, EXPERT + "w1.weight", row * columns + 4, b"\xb8")
    verdict = validate(broken, source)
    assert verdict.exit_code == Kind.VALUE
    (fault,) = verdict.faults
    assert (fault.where, f"row {row}, column" in fault.what) == (EXPERT + "w1.weight", True)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), 3.0, 1e-40])
def test_scales_are_looked_at_even_in_a_sample(broken: Path, source: Path, scale: float) -> None:
    """Each is read, whatever is sampled."""
    poke(broken, EXPERT + "w2.weight_scale", 8, np.float32(scale).tobytes())
    assert validate(broken, source, sample=0).exit_code == Kind.SCALE


def test_the_index_is_compared_in_both_directions(broken: Path, source: Path) -> None:
    """A tensor listed in another shard, one not listed, one that is not there."""
    path = broken / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    for change in ({EXPERT + "w1.weight": shards[0]}, {"no.such.tensor": shards[0]}):
        path.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], **change}}))
        assert validate(broken, source).exit_code == Kind.INDEX
    del index["weight_map"][EXPERT + "w1.weight"]
    path.write_text(json.dumps(index))
    assert validate(broken, source).exit_code == Kind.INDEX


def test_gaudi2s_infinities(source: Path, tmp_path: Path) -> None:
    """0x7C is 384 to an OCP reader and NaN on Gaudi 2; the config says which reader it is for."""
    folder = convert(source, tmp_path / "fp8", GAUDI2).target
    poke(folder, EXPERT + "w1.weight", 0, b"\x7c")
    assert validate(folder, source).exit_code == Kind.CODE


def test_several_faults_give_the_first_class(broken: Path, source: Path) -> None:
    """All are listed, the lowest number is the exit code."""
    (broken / "LICENSE").unlink()
    poke(broken, EXPERT + "w1.weight", 0, b"\x80")
    verdict = validate(broken, source)
    assert {fault.kind for fault in verdict.faults} == {Kind.CODE, Kind.FILE}
    assert verdict.exit_code == Kind.CODE


def test_command_line(broken: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 when valid, the class of fault otherwise, 2 for a folder that is none; JSON names the tensor."""
    command = ["validate", str(broken), "--source", str(source)]
    assert main(command) == 0
    assert main([*command, "--self-test"]) == 0
    os.truncate(sorted(broken.glob("*.safetensors"))[0], 1000)
    capsys.readouterr()
    assert main([*command, "--json"]) == Kind.UNREADABLE
    assert json.loads(capsys.readouterr().out)["faults"][0]["class"] == "unreadable"
    assert main(["validate", str(broken / "nowhere"), "--source", str(source)]) == 2


def test_nothing_is_shared_with_the_converter() -> None:
    """By its import statements, and by what is loaded after importing it: no converter, no formats, no torch."""
    package = Path(m3hal.checkpoint.validate.__file__).parent
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith("m3hal") or name.startswith("m3hal.checkpoint.validate"), (path.name, name)
    script = "import sys, m3hal.checkpoint.validate; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded if name.startswith(("m3hal.checkpoint.convert", "m3hal.formats"))]
    assert not {"torch", "safetensors"}.intersection(loaded)


def test_tables_against_ml_dtypes() -> None:
    """Every byte of E4M3 (OCP), every code of E2M1, and Gaudi 2's table, which differs from OCP's in 14 codes."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is a development dependency")
    every = np.arange(256, dtype=np.uint8)
    ocp = every.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert np.array_equal(tables.e4m3(False), ocp, equal_nan=True)
    gaudi = every.view(ml_dtypes.float8_e4m3).astype(np.float64)
    assert np.array_equal(tables.e4m3(True), np.where(np.isinf(gaudi), np.nan, gaudi), equal_nan=True)
    differ = ~((tables.e4m3(True) == ocp) | (np.isnan(tables.e4m3(True)) & np.isnan(ocp)))
    assert np.flatnonzero(differ).tolist() == [*range(0x78, 0x7F), *range(0xF8, 0xFF)]
    assert np.array_equal(tables.E2M1, every[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float64))
