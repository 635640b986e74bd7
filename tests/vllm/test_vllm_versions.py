"""Every hook, signature and field of vLLM that m3hal uses is there, in the installed vLLM and in 0.33.

0.33 has no build for CPUs: what m3hal uses of it is recorded from its wheel. `make test-all` fetches the wheel,
compares the record with its sources and runs an engine on its Python.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from vllm_hooks import CALLED, CONFIG, FIELDS, OURS, OVERRIDDEN, RECORD, Hooks, imports
from vllm_sources import Sources, overlay, parameters

CACHE = Path(__file__).parents[2] / ".cache" / "wheels"
REASON = "no wheel of vLLM 0.33 in .cache/wheels; `python scripts/vendor_wheels.py` fetches it"


def next_wheel() -> Path:
    """The wheel of 0.33; skips the test without it."""
    wheels = sorted(CACHE.glob("vllm-0.33.*.whl"))
    return wheels[0] if wheels else pytest.skip(REASON)


def installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module", params=["installed", "0.33"])
def vllm(request: pytest.FixtureRequest) -> Hooks:
    if request.param == "installed":
        return Hooks.of(Sources(installed().parent))
    return Hooks.recorded(json.loads(RECORD.read_text()))


def test_every_import_is_there(vllm: Hooks) -> None:
    """Whatever ``from vllm... import`` names; of 0.33, what was recorded when m3hal came to import it."""
    wanted = {f"{module}.{name}" for module, name in imports()}
    assert len(wanted) > 40
    assert sorted(wanted - vllm.imports) == [], "not there, or not recorded yet: see tests/vllm/vllm_hooks.py"


@pytest.mark.slow
def test_the_record_is_what_the_wheel_says() -> None:
    """The quick tests read the record; here it is read again in the wheel's sources."""
    wheel, record = next_wheel(), json.loads(RECORD.read_text())
    assert wheel.name.split("-")[1] == record["version"]
    assert Hooks.of(Sources(wheel)) == Hooks.recorded(record)


@pytest.mark.parametrize("where", OVERRIDDEN, ids=lambda key: key[1])
def test_what_is_overridden_is_called_as_m3hal_expects(vllm: Hooks, where: tuple[str, str]) -> None:
    """The same parameters in the same order, and no other that a caller must give."""
    names, required = vllm.functions[":".join(where)]
    assert names[: len(OVERRIDDEN[where])] == list(OVERRIDDEN[where])
    assert required <= set(OVERRIDDEN[where])


@pytest.mark.parametrize("where", CALLED, ids=lambda key: key[1])
def test_what_is_called_takes_what_m3hal_gives(vllm: Hooks, where: tuple[str, str]) -> None:
    """Each parameter by its name, and nothing else is required."""
    names, required = vllm.functions[":".join(where)]
    assert [name for name in CALLED[where] if name not in names] == []
    assert required <= set(CALLED[where])


@pytest.mark.parametrize("where", FIELDS, ids=lambda key: key[1])
def test_fields_are_there(vllm: Hooks, where: tuple[str, str]) -> None:
    """Of configurations, cache specs and metadata; also inherited ones."""
    assert set(FIELDS[where].split()) - vllm.fields[":".join(where)] == set()


def test_no_field_is_used_that_is_not_checked() -> None:
    """The tables above hold every field of vLLM's configuration that the plugin's sources mention."""
    text = "\n".join(file.read_text() for file in OURS.glob("*.py"))
    used = set(re.findall(r"\b(?:vllm|model|cache|parallel|scheduler|attention|compilation)_config\.(\w+)", text))
    known = {name for (module, _), fields in FIELDS.items() if module == CONFIG for name in fields.split()}
    assert used - known == set()


def test_changes_are_noticed(tmp_path: Path) -> None:
    """A moved name is followed; a renamed one, a new required parameter and a lost field are not there."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("from .new import *\nfrom .new import moved as old\n")
    (package / "new.py").write_text(
        "class Base:\n    field: int\n    def run(self, x, y, *, z, w=1): self.made = x\nclass moved(Base): pass\n"
    )
    sources = Sources(tmp_path)
    assert sources.find("vllm", "old") is not None
    assert sources.find("vllm", "renamed") is None
    function = sources.function("vllm", "old.run")
    assert function is not None
    assert parameters(function) == (["x", "y", "z", "w"], {"x", "y", "z"})
    assert sources.attributes("vllm", "old") == {"field", "run", "made"}


@pytest.mark.engine
@pytest.mark.slow
def test_the_engine_runs_on_the_next_python(
    engine: Any, checkpoint: Any, prompts: Any, oracle: Any, difference: Any, tmp_path: Path
) -> None:
    """vLLM 0.33's Python over the installed compiled modules: the tokens are transformers', cached ones too."""
    tree = overlay(next_wheel(), installed(), tmp_path)
    found = engine("plain", env={"PYTHONPATH": str(tree)}, checkpoint=checkpoint, prompts=prompts)
    assert found["version"].startswith("0.33.")
    for mode, completions in found["rounds"].items():
        assert difference(completions, oracle) == "", mode
