"""``import m3hal`` is cheap, and nothing on the way to a plan needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import m3hal

LIMIT_MS = 30
#: Machines that run tests are busier than those that measure; benchmarks/dispatch.py holds the limit itself.
SLACK = 3


def python(script: str) -> Any:
    """What a fresh interpreter prints as JSON."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_imports_nothing_heavy() -> None:
    """No torch, no vendor, no entry-point scan, no stevedore."""
    loaded = python("import sys, json, m3hal; print(json.dumps(sorted(sys.modules)))")
    heavy = {"torch", "numpy", "stevedore", "importlib.metadata", "m3hal.dispatch", "m3hal.ops"}
    assert heavy.isdisjoint(loaded)


def test_is_fast() -> None:
    """At most 30 ms over bare Python, with slack for a busy machine."""
    script = "import json, time; t = time.perf_counter(); import m3hal; print(json.dumps(time.perf_counter() - t))"
    best = min(python(script) for _ in range(3))
    assert best * 1e3 <= LIMIT_MS * SLACK


def test_planning_needs_no_torch() -> None:
    """Definitions are loaded and a plan is made, explained and exported without it."""
    script = """
import json, sys, m3hal
shape = m3hal.ModelShape.from_config(
    m3hal.MINIMAX_M3, dtype="bfloat16", page_size=128, max_tokens=64, max_seqs=4, max_context=1024)
plan = m3hal.plan(shape, "cpu", m3hal.Policy.resolve({"backend": "reference"}, environ={}))
plan.explain(), plan.to_json()
print(json.dumps("torch" in sys.modules))
"""
    assert python(script) is False


@pytest.mark.parametrize("name", [name for name in m3hal.__all__ if name != "__version__"])
def test_flat_names_resolve(name: str) -> None:
    """Every public name is there, once, and shows in dir()."""
    assert getattr(m3hal, name) is getattr(m3hal, name)
    assert name in dir(m3hal)


def test_unknown_name_is_an_attribute_error() -> None:
    """As for any module."""
    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        m3hal.plam  # noqa: B018
