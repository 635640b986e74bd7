"""What stands in docs/claims: whole files, under their names, in which nothing failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from m3hal.dispatch.levels import digest

CLAIMS = sorted((Path(__file__).parents[2] / "docs" / "claims").glob("*"))


def test_the_references_claim_is_there() -> None:
    """The backend that everything is compared with has one."""
    assert "reference-cpu.json" in {path.name for path in CLAIMS}


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: path.name)
def test_a_claim_is_as_it_was_written(path: Path) -> None:
    """Its digest covers it, its name is backend and device, it is of the whole suite at seed 0, and no case failed."""
    claim = json.loads(path.read_text())
    assert digest(claim) == claim["digest"], "it was edited"
    assert path.name == f"{claim['backend']}-{claim['device'].replace(':', '-')}.json"
    assert claim["suite"]["whole"]
    assert claim["seed"] == 0
    assert not [row["case"] for row in claim["results"] if row["status"] == "fail"]
