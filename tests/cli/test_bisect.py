"""What `m3hal bisect` refuses before it starts an engine, and how it tells what it found."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from m3hal_conformance import bisect as bisecting

from m3hal.checkpoint import tiny
from m3hal.cli import main
from m3hal.dispatch import Impl, Manifest, register, unregister

ROW = {"operator": "rms_norm", "layer": "model.layers.1.input_layernorm", "backend": "acme", "impl_id": "0" * 16}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A config is all that is read before an engine starts."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.config()))
    return folder


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """``found(finding)``: what the bisection, which is not run, finds; returns the questions."""

    def use(finding: bisecting.Finding) -> list[Any]:
        asked: list[Any] = []
        monkeypatch.setattr(bisecting, "bisect", lambda question, say: asked.append(question) or finding)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, find=importlib.util.find_spec: name == "vllm" or find(name)
        )
        return asked

    return use


def run_of(*rows: dict[str, Any], tokens: tuple[int, ...] = (1, 2)) -> bisecting.Run:
    return bisecting.Run(tokens, (-0.1, -0.2), rows, 300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0 must be 1 or more"),
        (["--engine", "{"], "--engine can't be read as JSON"),
        (["--engine", "[]"], "--engine must be an object"),
        (["--backend", "refrence"], "Did you mean 'reference'"),
        (["--into", "."], "is not an empty folder"),
    ],
)
def test_slips_exit_with_2(
    arguments: list[str], message: str, model: Path, tmp_path: Path, found: Any, capsys: Any, monkeypatch: Any
) -> None:
    """Each is a sentence, no engine starts, and no folder is left behind."""
    asked = found(bisecting.Finding(run_of()))
    monkeypatch.chdir(tmp_path)
    assert main(["bisect", str(model), "a prompt", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert asked == []
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize(
    "files",
    [{}, *({"config.json": t} for t in ("{", '{"hidden_size": 8}', "[1]", "[" * 100_000, '{"text_config": 5}'))],
)
def test_what_is_no_checkpoint_exits_with_2(
    files: dict[str, str], tmp_path: Path, found: Any, monkeypatch: Any
) -> None:
    """An empty folder, a broken config, another model's, one that is no object, nested too deeply, of other types."""
    found(bisecting.Finding(run_of()))
    other = tmp_path / "other"
    other.mkdir()
    for name, text in files.items():
        (other / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["bisect", str(other), "a prompt", "--backend", "reference"]) == 2
    assert main(["bisect", str(other), "@nowhere"]) == 2


def test_without_vllm_it_exits_with_3(monkeypatch: Any, capsys: Any) -> None:
    """It says what to install."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    assert main(["bisect", "tiny", "a prompt"]) == 3
    assert "vLLM, which is not installed" in capsys.readouterr().err


def test_nothing_found(model: Path, tmp_path: Path, found: Any, capsys: Any, monkeypatch: Any) -> None:
    """Exit code 0, the nearest call, no folder; the prompt may come from a file, the dtype is the checkpoint's."""
    asked = found(bisecting.Finding(run_of({**ROW, "compared": 9, "failed": 0, "worst": 0.25})))
    (tmp_path / "prompt.txt").write_text("many words")
    monkeypatch.chdir(tmp_path)
    assert main(["bisect", str(model), "@prompt.txt", "--backend", "reference"]) == 0
    out = capsys.readouterr().out
    assert "nothing leaves its bound: 9 calls of 'reference' compared" in out
    assert "nearest: rms_norm at model.layers.1.input_layernorm, 0.25 of its bound" in out
    (question,) = asked
    assert (question.prompt, question.engine["dtype"], question.steps) == ("many words", "float32", 4)
    assert not list(tmp_path.glob("m3hal-bisect-*"))


def test_a_finding(model: Path, tmp_path: Path, found: Any, capsys: Any) -> None:
    """Exit code 1; layer, operator, by how much, and the command that asks the call again; the same as JSON."""
    row = {
        **ROW,
        "compared": 9,
        "failed": 2,
        "worst": 40.0,
        "by": "40 times the bound",
        "first": 3,
        "sentence": "out: off",
        "capture": "x.pt",
    }
    finding = bisecting.Finding(
        run_of(row), row, "rms_norm", ("rms_norm",), True, replayed=True, after=run_of(tokens=(1, 3))
    )
    found(finding)
    arguments = ["bisect", str(model), "a prompt", "--backend", "reference", "--into", str(tmp_path / "into")]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "first: rms_norm of acme at model.layers.1.input_layernorm, 2 of 9 calls, at worst 40 times the bound" in out
    assert "confirmed: with rms_norm from the reference nothing leaves its bound" in out
    assert "1 of 2 tokens equal those with rms_norm from the reference" in out
    assert "m3hal replay x.pt --backend acme   (fails again)" in out
    assert main([*arguments, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["operator"], data["confirmed"], data["first"]["layer"]) == ("rms_norm", True, ROW["layer"])


def test_who_served_and_who_was_never_called(model: Path, tmp_path: Path, found: Any, capsys: Any) -> None:
    """A line for what ran, with whom auto chose, and one for what a backend declares and nobody called."""
    rows = [
        {**ROW, "operator": name, "compared": 9, "failed": 0, "worst": 0.2} for name in ("rms_norm", "rope_partial")
    ]
    found(bisecting.Finding(run_of(*rows)))
    impls = {name: (Impl(f"m3hal.reference:{name}"),) for name in ("rms_norm", "rope_partial", "swiglu_oai")}
    register(Manifest("acme", "toy", ">=1,<2", ("cpu",), impls, priority=10**6))
    try:
        for options, asked in ((["--backend", "acme,reference"], "served"), ([], "backend 'auto' chose")):
            folder = str(tmp_path / asked)
            assert main(["bisect", str(model), "x", *options, "--into", folder]) == 0
            out = capsys.readouterr().out
            assert f"{asked}: acme: rms_norm, rope_partial\n" in out
            assert "never called of acme: swiglu_oai\n" in out
    finally:
        unregister("acme")


def test_no_call_compared_is_no_pass(model: Path, tmp_path: Path, found: Any, capsys: Any) -> None:
    """Nothing is known then, and the exit code is 3."""
    found(bisecting.Finding(run_of()))
    assert main(["bisect", str(model), "x", "--backend", "reference", "--into", str(tmp_path / "into")]) == 3
    assert "no call was compared" in capsys.readouterr().err


def test_a_fault_that_only_swapping_shows(model: Path, tmp_path: Path, found: Any, capsys: Any) -> None:
    """Exit code 1, with the operator whose swap removed it."""
    run = run_of({**ROW, "compared": 9, "failed": 0, "worst": 0.25})
    found(bisecting.Finding(run, culprit="moe_experts", swapped=("moe_experts",), cleared=True, after=run_of()))
    assert main(["bisect", str(model), "x", "--backend", "reference", "--into", str(tmp_path / "into")]) == 1
    assert "moe_experts does it" in capsys.readouterr().out
