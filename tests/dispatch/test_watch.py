"""What watching does to planning and binding; what it does to calls is tested with the suite."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from m3hal.dispatch import Policy, UnsupportedError, plan
from m3hal.shape import ModelShape


def made(shape: ModelShape, folder: Path, backend: str = "reference", **keys: Any) -> Any:
    policy = Policy.resolve({"backend": backend, "capture_dir": str(folder), **keys}, environ={})
    return plan(shape, "cpu", policy)


def test_one_factory_call_serves_all_watched_layers(toy: Any, shape: ModelShape, tmp_path: Path) -> None:
    """Layers have callables of their own; what was bound, and may have compiled, is one."""
    sites = []

    def factory(site: Any) -> Any:
        sites.append(site)
        return lambda x, weight, out=None: "ran"

    toy("acme", rms_norm=factory)
    p = made(shape, tmp_path, "acme,reference", mode="record")
    one, other = (p.bind("rms_norm", "moe", f"model.layers.{layer}") for layer in (3, 4))
    assert one.run is not other.run
    assert one.unwatched is other.unwatched
    assert one is p.bind("rms_norm", "moe", "model.layers.3")
    assert len(sites) == 1


def test_a_watched_callable_is_opaque_to_compilers(shape: ModelShape, tmp_path: Path) -> None:
    """It writes files and compares, which no graph may swallow."""
    assert not made(shape, tmp_path, mode="shadow").bind("rms_norm", "moe", "model.norm").traceable
    assert made(shape, tmp_path).bind("rms_norm", "moe", "model.norm").traceable


def test_a_pinned_plan_may_be_watched(shape: ModelShape, tmp_path: Path) -> None:
    """The pin decides who serves; whether that is watched, the policy beside it."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(made(shape, tmp_path).to_json()))
    policy = Policy.resolve({"plan": str(file), "mode": "shadow"}, environ={})
    assert plan(shape, "cpu", policy).policy.watch.mode == "shadow"


def test_without_the_suite_watching_is_refused(
    shape: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is bound, with the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'm3hal\[conformance\]'"):
        made(shape, tmp_path, mode="record")
