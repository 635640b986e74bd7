"""The validator: passes what the converter writes, finds every kind of fault, and shares nothing with the converter."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import m3hal.checkpoint.validate
from m3hal.checkpoint.convert import GAUDI2, HOPPER, convert
from m3hal.checkpoint.synthetic import write
from m3hal.checkpoint.validate import Kind, checks, self_test, tables, validate
from m3hal.checkpoint.validate.reader import Folder
from m3hal.checkpoint.validate.selftest import CORRUPTIONS
from m3hal.cli import main
from tests.checkpoint.conftest import SMALL

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


CONFIGS: dict[str, Callable[[dict[str, Any]], object]] = {
    "attention taken for FP8": lambda quant: quant["ignore"].remove("re:.*self_attn.*"),
    "the head taken for FP8": lambda quant: quant["ignore"].remove("re:.*lm_head"),
    "an expert ignored by its name": lambda quant: quant["ignore"].append(EXPERT + "w1"),
    "an unreadable pattern": lambda quant: quant["ignore"].append("re:("),
    "a number among the patterns": lambda quant: quant["ignore"].append(3),
    "no ignore list": lambda quant: quant.update(ignore=None),
    "groups in a list": lambda quant: quant.update(config_groups=[1]),
    "an unknown flavor": lambda quant: quant.update(fp8_dtype_flavor="float8_e5m2"),
    "a cache scheme that the source hasn't": lambda quant: quant.update(kv_cache_scheme={"num_bits": 8}),
    "another status": lambda quant: quant.update(quantization_status="frozen"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_describes_other_tensors(broken: Path, source: Path, case: str) -> None:
    """All that an engine acts on is looked at, for every matrix, and nothing in it ends in a traceback."""
    config = json.loads((broken / "config.json").read_text())
    CONFIGS[case](config["quantization_config"])
    (broken / "config.json").write_text(json.dumps(config))
    assert validate(broken, source).exit_code == Kind.CONFIG


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_second_quantization_config(broken: Path, source: Path, where: str) -> None:
    """One that engines may prefer to the first; or none where the source has it."""
    config = json.loads((broken / "config.json").read_text())
    if where == "inside":
        config["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    else:
        config["quantization_config"] = "fp8"
    (broken / "config.json").write_text(json.dumps(config))
    assert validate(broken, source).exit_code == Kind.CONFIG


@pytest.mark.parametrize("values", [{"weight_map": [1]}, {"weight_map": None}, {"metadata": [1]}, {"metadata": None}])
def test_an_index_of_other_types(broken: Path, source: Path, values: dict[str, Any]) -> None:
    """A list or null where an object belongs is a fault of the index."""
    path = broken / "model.safetensors.index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    assert validate(broken, source).exit_code == Kind.INDEX


HEADERS: dict[str, Callable[[str], str]] = {
    "nested too deeply": lambda text: "[" * 200_000 + "]" * 200_000,
    "offsets that are no integers": lambda text: text.replace('"data_offsets":[0,', '"data_offsets":[0.0,', 1),
    "an extent beyond 64 bits": lambda text: text.replace('"shape":[', '"shape":[36893488147419103232,', 1),
    "something named twice": lambda text: text.replace('"dtype":', '"dtype":"U8","dtype":', 1),
}


@pytest.mark.parametrize("case", HEADERS)
def test_odd_headers(broken: Path, source: Path, case: str) -> None:
    """Unreadable, not a traceback."""
    shard = sorted(broken.glob("*.safetensors"))[0]
    whole = shard.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    text = HEADERS[case](whole[8 : 8 + length].decode())
    assert text.encode() != whole[8 : 8 + length]
    shard.write_bytes(len(text).to_bytes(8, "little") + text.encode() + whole[8 + length :])
    assert validate(broken, source).exit_code == Kind.UNREADABLE


def test_a_folder_named_like_a_shard(broken: Path, source: Path) -> None:
    """Is unreadable as one."""
    (broken / "more.safetensors").mkdir()
    assert validate(broken, source).exit_code == Kind.UNREADABLE


def test_the_source_must_be_mxfp4(converted: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Source and target exchanged are one clear fault; so is a source without experts, which would ask for nothing."""
    assert "are the folders swapped?" in str(validate(source, converted).faults[0])
    assert "are the folders swapped?" in str(validate(converted, converted).faults[0])
    assert main(["validate", str(converted), "--source", str(source), "--sample", "0"]) == 2
    assert "compares no matrix" in capsys.readouterr().err


def test_a_source_without_experts(tmp_path: Path) -> None:
    """Nothing to compare is not valid."""
    plain = write(tmp_path / "bf16", SMALL, layout="bf16")
    assert "has no MXFP4 expert" in str(validate(plain, plain).faults[0])


def decoded(folder: Path, module: str, swap: bool = False) -> npt.NDArray[np.float64]:
    """A matrix of the source in float64; swap: the high nibble first, which is wrong."""
    views = Folder(folder).tensors
    codes = np.array(views[module + ".weight"].rows())
    codes = (codes >> 4) | (codes << 4) if swap else codes
    return tables.mxfp4(codes, np.array(views[module + ".weight_scale"].rows()))


def quantised(values: npt.NDArray[np.float64], top: float) -> tuple[bytes, bytes]:
    """A careless converter: a power-of-two scale per row from its largest number, and a cast that rounds."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is a development dependency")
    scale = 2.0 ** np.floor(np.log2(np.abs(values).max(axis=1, keepdims=True) / top))
    fp8 = (values / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(fp8 == 0x80, 0, fp8).astype(np.uint8).tobytes(), scale.astype(np.float32).tobytes()


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [("none", 0), ("nibbles", Kind.VALUE), ("negative zeros", Kind.CODE), ("rounds", None)],
)
def test_other_peoples_converters(tmp_path: Path, mistake: str, expected: int | None) -> None:
    """One that is right by other means passes; swapped nibbles, a sign on zero, and a rounded wide row do not."""
    source = write(tmp_path / "source", SMALL)
    target = convert(source, tmp_path / "fp8", GAUDI2).target
    if mistake == "rounds":  # 2^40 above its neighbours, which no scale holds with them
        poke(source, EXPERT + "w1.weight_scale", 2, bytes([160]))
    weight, scale = quantised(decoded(source, EXPERT + "w1", swap=mistake == "nibbles"), top=128.0)
    if mistake == "negative zeros":
        weight = weight.replace(b"\x00", b"\x80", 1)
    poke(target, EXPERT + "w1.weight", 0, weight)
    poke(target, EXPERT + "w1.weight_scale", 0, scale)
    found = validate(target, source).exit_code
    assert found == expected if expected is not None else found in (Kind.VALUE, Kind.CODE)


def test_shards_that_the_sources_index_does_not_name(converted: Path, source: Path, tmp_path: Path) -> None:
    """Leftovers in the source are not read, as the converter does not read them; in the target they are a fault."""
    own = Path(shutil.copytree(source, tmp_path / "own"))
    shutil.copy(sorted(own.glob("*.safetensors"))[0], own / "old.safetensors")
    assert validate(converted, own).exit_code == 0
    target = Path(shutil.copytree(converted, tmp_path / "fp8"))
    shutil.copy(sorted(target.glob("*.safetensors"))[0], target / "old.safetensors")
    assert validate(target, source).exit_code == Kind.UNREADABLE
