"""`m3hal bisect` in stock vLLM: it names the layer and operator of a wrong backend, and acquits a right one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

#: each starts several engines; conformance/tests/test_bisect.py has the decisions, test_watching.py the shadow
pytestmark = [pytest.mark.engine, pytest.mark.slow]

ZOO = Path(__file__).parents[2] / "conformance" / "zoo"
PROMPT = "A sparse attention layer does not look at every token of the past. " * 30
#: wrong backend -> where it is wrong first
MUTANTS = {
    "zoo-block-scores-every-second-key": ("model.layers.1.self_attn", "block_scores"),
    "zoo-rms-norm-plain-weight": ("model.layers.0.input_layernorm", "rms_norm"),
    "zoo-moe-experts-up-first": ("model.layers.1.block_sparse_moe", "moe_experts"),
    "zoo-sparse-attention-misses-last-key": ("model.layers.1.self_attn", "sparse_attention"),
}


def installed(mutant: str, folder: Path) -> str:
    """Installs a mutant of the zoo as a distribution of its own in a folder; what PYTHONPATH must be."""
    module = mutant.replace("-", "_")
    found = f"next(m for m in MUTANTS if m.backend == {mutant!r})"
    (folder / f"{module}.py").write_text(f"from m3hal_broken_zoo import MUTANTS\nMANIFEST = {found}.manifest()\n")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[m3hal.backends]\n{mutant} = {module}:MANIFEST\n")
    return os.pathsep.join(filter(None, [str(folder), str(ZOO), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_backend_is_named(mutant: str, python: Any, checkpoint: Path, tmp_path: Path) -> None:
    """The first layer and operator, confirmed by swapping it; its capture fails again, here as in the bisection."""
    path = installed(mutant, tmp_path)
    into = tmp_path / "into"
    ask = ["-m", "m3hal", "bisect", checkpoint, PROMPT, "--backend", f"{mutant},reference", "--steps", 2]
    done = python(*ask, "--into", into, "--json", env={"PYTHONPATH": path}, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["first"]["layer"], found["first"]["operator"]) == MUTANTS[mutant]
    assert found["first"]["worst"] > 10
    assert (found["confirmed"], found["replay_fails"]) == (True, True)
    again = ["-m", "m3hal", "replay", found["first"]["capture"], "--backend", mutant]
    assert python(*again, env={"PYTHONPATH": path}, check=False).returncode == 1
    assert python(*again[:-1], "reference").returncode == 0


def test_the_reference_is_acquitted(python: Any, checkpoint: Path, tmp_path: Path) -> None:
    """Exit code 0."""
    ask = ["-m", "m3hal", "bisect", checkpoint, PROMPT, "--backend", "reference", "--into", tmp_path / "into"]
    assert "nothing leaves its bound" in python(*ask).stdout
