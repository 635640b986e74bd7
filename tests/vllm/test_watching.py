"""Modes shadow and record in stock vLLM: nothing that is said changes, every call is seen, files are cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from m3hal.cli import main

pytestmark = pytest.mark.engine

#: operator -> calls of a forward, one per layer that has it
SEEN = {
    "rms_norm": 1,
    "add_rms_norm": 8,
    "qk_norm_rope_insert": 4,
    "paged_attention": 1,
    "select_blocks": 3,
    "sparse_attention": 3,
    "route_topk": 3,
    "moe_experts": 3,
    "swiglu_oai": 4,
}
STEPS = 4


@pytest.fixture(scope="module")
def watched(engine: Any, checkpoint: Path, prompts: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``watched(mode, rate)`` -> what the engine said, and its capture folder."""

    def run(mode: str, rate: float) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(mode)
        config = {"backend": "reference", "mode": mode, "sample_rate": rate, "capture_dir": str(folder)}
        return engine("watching", checkpoint=checkpoint, prompts=prompts[:4], tokens=STEPS, config=config), folder

    return run


def test_shadow_sees_every_call_and_finds_no_fault(watched: Any, oracle: Any, difference: Any) -> None:
    """The reference stays within its bounds on a model's own numbers, in every layer; the log says so at the end."""
    found, folder = watched("shadow", 1)
    assert difference(found["completions"], oracle[:4]) == ""
    (file,) = folder.glob("shadow-*.json")
    rows = json.loads(file.read_text())["rows"]
    assert {row["compared"] for row in rows} == {STEPS}
    assert {name: sum(row["operator"] == name for row in rows) for name in SEEN} == SEEN
    assert len({(row["operator"], row["layer"]) for row in rows}) == len(rows) == sum(SEEN.values())
    assert [row for row in rows if row["failed"]] == []
    assert "none left its bound" in found["log"]
    assert list(folder.glob("*.pt")) == []


def test_recorded_calls_are_cases(watched: Any, oracle: Any, difference: Any, capsys: Any) -> None:
    """Every operator leaves files that the reference passes; the log warns, and the configuration holds the mode."""
    found, folder = watched("record", 0.5)
    assert difference(found["completions"], oracle[:4]) == ""
    assert "the files hold user data" in found["log"]
    assert found["additional_config"]["mode"] == "record"
    files = {path.name.partition("-")[0]: path for path in sorted(folder.glob("*.pt"))}
    assert set(files) == set(SEEN)
    assert all(main(["replay", str(path)]) == 0 for path in files.values()), capsys.readouterr().out
