"""`m3hal plan`: exported, compared, pinned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m3hal.cli import main
from m3hal.dispatch import discovery


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference, whatever else is installed."""
    entries = tuple(entry for entry in discovery._entries() if entry.name == "reference")
    monkeypatch.setattr(discovery, "_entries", lambda: entries)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(exit code, stdout, stderr) of a command."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def exported(run: Any, tmp_path: Path) -> str:
    """A plan's file."""
    path = str(tmp_path / "plan.json")
    assert run("plan", "export", path, "--backend", "reference", "--device", "cpu")[0] == 0
    return path


def test_the_same_plan(run: Any, exported: str) -> None:
    """With itself, and with the one that is made now: exit code 0, in words and as JSON."""
    asked = ("--backend", "reference", "--device", "cpu")
    fingerprint = json.loads(Path(exported).read_text())["fingerprint"]
    assert run("plan", "diff", exported, exported) == (0, f"the same plan, {fingerprint}\n", "")
    assert run("plan", "diff", exported, *asked)[0] == 0
    code, out, _ = run("plan", "diff", exported, *asked, "--json")
    assert (code, json.loads(out)["differences"]) == (0, [])


def test_what_differs(run: Any, exported: str, tmp_path: Path) -> None:
    """A table with both files as columns, exit code 1; fewer heads on a rank leave the fingerprint as it is."""
    other = str(tmp_path / "tp2.json")
    run("plan", "export", other, "--backend", "reference", "--device", "cpu", "--tp", "2")
    code, out, _ = run("plan", "diff", exported, other)
    assert code == 1
    assert f"{exported}  {other}" in out
    assert "site sparse_attention" in out
    assert "one fingerprint, so a pin accepts either" in out
    code, out, _ = run("plan", "diff", exported, other, "--json")
    rows = json.loads(out)["differences"]
    assert (code, {"about": "site sparse_attention", "what": "num_kv_heads", "was": "4", "now": "2"} in rows) == (
        1,
        True,
    )
    code, out, _ = run("plan", "diff", exported, "--backend", "reference", "--device", "hip:gfx950")
    assert (code, "two fingerprints" in out) == (1, True)


def test_what_is_no_plan(run: Any, exported: str, tmp_path: Path) -> None:
    """Too many files, a missing one, something else's JSON, a folder: 2; a folder that is not there: 1."""
    (tmp_path / "other.json").write_text('{"a": 1}')
    for arguments in (
        ("diff", exported, exported, exported),
        ("export", exported, exported),
        ("diff", exported, str(tmp_path / "none.json")),
        ("diff", exported, str(tmp_path / "other.json")),
        ("export", str(tmp_path)),
    ):
        assert run("plan", *arguments)[0] == 2, arguments
    code, _, err = run("plan", "export", str(tmp_path / "none" / "plan.json"), "--backend", "reference")
    assert (code, "name another file" in err) == (1, True)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("policy", [], "its 'policy' is a list, not a dict"),
        ("sites", [1], "its 'sites' is a list, not a dict"),
        ("choices", {}, "its 'choices' is a dict, not a list"),
        ("choices", [1], "a row of its tables is no object"),
        ("choices", [{"operator": "linear", "site": 5}], "a choice has no operator or no site"),
        ("device", 5, "its 'device' is a int, not a str"),
        ("fingerprint", float("nan"), "its 'fingerprint' is a float, not a str"),
        ("layouts", {"moe": {}}, "KeyError: 'layout'"),
        ("policy", {"backend": {}}, "'backend' from the plan"),
    ],
)
def test_a_plan_that_was_edited(run: Any, exported: str, key: str, value: object, told: str) -> None:
    """Of another form than an exported one: 2 with what is wrong, for diff and for a pin."""
    data = json.loads(Path(exported).read_text())
    Path(exported).write_text(json.dumps(data | {key: value}))
    for arguments in (("plan", "diff", exported), ("explain", "--plan", exported)):
        code, _, err = run(*arguments)
        assert (code, told in err) == (2, True), err


def test_a_name_that_is_too_long(run: Any, tmp_path: Path) -> None:
    """A sentence, not a traceback."""
    code, _, err = run("plan", "export", str(tmp_path / ("x" * 300)), "--backend", "reference", "--device", "cpu")
    assert (code, "File name too long" in err) == (1, True), err


def test_a_checkpoint_whose_experts_are_stored_otherwise(run: Any, tmp_path: Path) -> None:
    """``--weights nvfp4`` plans NVFP4 experts and MXFP8 projections, and diff tells them from a plain one."""
    plain, mixed = str(tmp_path / "plain.json"), str(tmp_path / "mixed.json")
    for path, more in ((plain, ()), (mixed, ("--weights", "nvfp4"))):
        assert run("plan", "export", path, "--backend", "reference", "--device", "cpu", *more)[0] == 0
    rows = json.loads(run("plan", "diff", plain, mixed, "--json")[1])["differences"]
    assert {(row["about"], row["what"]): row["now"] for row in rows} == {
        ("site dense_attention", "weight_format"): "mxfp8",
        ("site sparse_attention", "weight_format"): "mxfp8",
        ("site dense_mlp", "weight_format"): "mxfp8",
        ("site moe", "weight_format"): "nvfp4",
        ("site moe", "projection_format"): "mxfp8",
    }


def test_export_tells_when_nothing_serves(run: Any, tmp_path: Path) -> None:
    """The file is there, and the exit code is 3, as explain's is."""
    path = tmp_path / "plan.json"
    assert run("plan", "export", str(path), "--device", "cuda:sm_90")[0] == 3
    assert json.loads(path.read_text())["in_tree"] is True


def test_a_pin_refuses_in_one_sentence(run: Any, exported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned, it comes out again; where it can't, one line says what differs and what to do."""
    monkeypatch.setenv("M3HAL_PLAN", exported)
    assert run("explain", "--device", "cpu")[0] == 0
    plan = json.loads(Path(exported).read_text())
    for row in plan["choices"]:
        if row["operator"] == "rms_norm":
            row["impl_id"] = "0" * 16
    Path(exported).write_text(json.dumps({**plan, "fingerprint": "0" * 16}))
    code, _, err = run("explain", "--device", "cpu")
    assert code == 1
    assert err.count("\n") == 1
    assert f"the pinned plan {exported} can't be made here (rms_norm at dense_attention" in err
    assert "was reference rms_norm, is nothing" in err
    assert f"`m3hal plan export {exported}`" in err
