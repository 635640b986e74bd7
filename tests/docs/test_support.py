"""docs/support.md is what the claims in the tree say, and what it says of engines is what was recorded."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_matrix_is_current() -> None:
    """A claim or a kernel that changed changes the page."""
    script = runpy.run_path(str(ROOT / "scripts" / "support_page.py"))
    told = "docs/support.md is out of date; run `python scripts/support_page.py`, part of `make docs`"
    assert script["PAGE"].read_text() == script["page"](), told


def test_the_record_of_engines_is_of_tests_that_are_there() -> None:
    """Each run names its test and formats, as scripts/engine_runs.py would run it again."""
    script = runpy.run_path(str(ROOT / "scripts" / "engine_runs.py"))
    record = json.loads(script["RECORD"].read_text())
    here = [run for run in record["runs"] if run["device"] == "cpu"]
    assert {run["test"]: (run["kv"], run["index"]) for run in here} == script["TESTS"]
    for test in script["TESTS"]:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_a_changed_plugin_ends_the_runs() -> None:
    """The record is stale with the first byte of the plugin that changes."""
    script = runpy.run_path(str(ROOT / "scripts" / "engine_runs.py"))
    before = script["runs"]()
    script["runs"].__globals__["content"] = lambda: "other"
    after = script["runs"]()
    assert {run["state"] for run in after} == {"stale: the plugin has changed since"}
    assert len(before) == len(after)
