"""Levels from the claims that packages ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import m3hal
from m3hal import ops
from m3hal.dispatch import Impl
from m3hal.dispatch.discovery import Found
from m3hal.dispatch.levels import digest, proved, shipped, with_stale
from m3hal.dispatch.screen import Candidate, Demands, _level

SHAPE = m3hal.ModelShape.from_config(
    m3hal.MINIMAX_M3, dtype="bfloat16", page_size=128, max_tokens=64, max_seqs=4, max_context=1024
)
SITE = SHAPE.sites()[0]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The claims folder of an installed package."""
    folder = tmp_path / "m3hal_claiming" / "claims"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


FOUND = Found("claiming", "m3hal-claiming", "1.0", "m3hal_claiming.manifest:MANIFEST")


def write(path: Path, executor: str, device: str, **statuses: str) -> dict[str, Any]:
    rows = [{"case": "linear/x", "impl_id": identity, "status": status} for identity, status in statuses.items()]
    suite = {"whole_operators": ["linear"]}
    body: dict[str, Any] = {"executor": executor, "device": device, "suite": suite, "results": rows}
    body["digest"] = digest(body)
    path.write_text(json.dumps(body))
    return body


def test_contract_and_hardware(package: Path) -> None:
    """A double proves the contract on every device, a run the device that it ran on; the higher one counts."""
    write(package / "a.json", "double", "cuda:sm_100", a="pass", b="pass", c="unsupported")
    write(package / "b.json", "in-process", "cuda:sm_90", b="pass")
    assert proved([FOUND], "cuda:sm_90") == {"a": "contract", "b": "hardware"}
    assert proved([FOUND], "cuda:sm_100") == {"a": "contract", "b": "contract"}


def test_failures_edits_and_strays_prove_nothing(package: Path) -> None:
    """One failed case ends a level; so do an edited claim, a file that is no claim, and an executor nobody knows."""
    write(package / "a.json", "double", "x:y", a="fail", b="waived")
    edited = write(package / "b.json", "double", "x:y", c="pass")
    (package / "b.json").write_text(json.dumps(edited | {"executor": "in-process"}))
    (package / "c.json").write_text("[")
    write(package / "d.json", "hearsay", "x:y", d="pass")
    assert proved([FOUND], "x:y") == {"d": "declared"}
    assert proved([Found("gone", "gone", "1", "no_such_package:MANIFEST")], "x:y") == {}


def test_a_part_of_the_cases_proves_nothing(package: Path) -> None:
    """One easy case is no level; a failure in one file is not outweighed by another file."""
    body = write(package / "a.json", "in-process", "x:y", a="pass")
    body["suite"] = {"whole_operators": ["rms_norm"]}
    (package / "a.json").write_text(json.dumps({**body, "digest": digest(body)}))
    write(package / "b.json", "in-process", "x:y", b="pass", c="pass")
    write(package / "c.json", "in-process", "x:y", b="fail")
    assert proved([FOUND], "x:y") == {"c": "hardware"}


def test_claims_about_other_files_are_called_stale(package: Path) -> None:
    """Where the files changed after they ran, on this device or on a double, it isn't said that no claim is shipped."""
    write(package / "a.json", "in-process", "x:y", old="pass")
    write(package / "b.json", "double", "cpu", still="pass")
    impl = Impl("m3hal_claiming:linear")

    def marked(identity: str, device: str, level: str = "declared", operator: str = "linear") -> str:
        one = Candidate(operator, "claiming", "m3hal-claiming", "1.0", impl, identity, level, 100)
        (made,) = with_stale(FOUND, [one], device)
        demands = Demands((), "hardware", False, True, device)
        told = _level(made, ops.load(operator), SITE, demands)
        assert (told or "").startswith("stale: it ran with other files, see `m3hal claim verify ") == bool(made.stale)
        return made.stale

    assert marked("new", "x:y") == f"m3hal claim verify {package}"
    assert marked("new", "x:z") == f"m3hal claim verify {package}"
    assert marked("new", "x:y", level="contract") == ""
    assert marked("new", "x:y", operator="rms_norm") == ""
    (package / "b.json").unlink()
    assert marked("new", "x:z") == ""
    assert marked("old", "x:y") == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"results": 5},
        {"results": [1, {"impl_id": ["a"], "status": "pass"}]},
        {"suite": 5},
        {"suite": {"whole_operators": 5}},
        {"implementations": [1]},
        {"implementations": {"linear": 5}},
    ],
)
def test_a_claim_of_another_form_proves_nothing(package: Path, wrong: dict[str, Any]) -> None:
    """Its digest holds and its types do not: no plan fails for that."""
    body = write(package / "a.json", "double", "x:y", a="pass") | wrong
    (package / "a.json").write_text(json.dumps({**body, "digest": digest(body)}))
    assert proved([FOUND], "x:y") == {}
    assert all(isinstance(claim["results"], list) for claim in shipped([FOUND]))


def test_files_that_cannot_be_read_prove_nothing(package: Path) -> None:
    """A link to nothing, a folder, a text that is nested too deeply, bytes that are no text."""
    (package / "a.json").symlink_to(package / "gone")
    (package / "b.json").mkdir()
    (package / "c.json").write_text('{"a":' * 100_000)
    (package / "d.json").write_bytes(b"\xff\xfe{}")
    assert proved([FOUND], "x:y") == {}
