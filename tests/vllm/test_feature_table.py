"""docs/serving.md says of every engine feature that it works or is refused, and which test shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "serving.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## What is served")[2].partition("## Quantised")[0].splitlines()
    if line.startswith("| ") and "---" not in line and not line.startswith("| feature")
]


def test_the_table_is_read() -> None:
    """At least the features that users ask for first."""
    text = " ".join(row[0] for row in ROWS)
    for feature in (
        "images",
        "MTP",
        "EAGLE3",
        "DSpark",
        "LoRA",
        "pipeline",
        "data with expert",
        "rebalancing",
        "sleep",
    ):
        assert feature in text
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_has_a_test(row: list[str]) -> None:
    """The function that the row names is there, with the case in brackets if it names one; refusals are refused."""
    found = re.fullmatch(r"`(\w+\.py)::(\w+)(?:\[(.+)\])?`", row[3])
    assert found is not None
    file, function, case = found.groups()
    source = (HERE / file).read_text()
    assert f"def {function}(" in source
    if case:
        assert f'("{case}", ' in source
    assert row[2].startswith("refused") == (function == "test_refusal_is_one_sentence" or "image" in function)
