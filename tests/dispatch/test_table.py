"""Tables for terminals, logs and pipes."""

from __future__ import annotations

from m3hal.dispatch.table import table

ROWS = [("rms_norm", True, "because the policy asks for it by name"), ("topk", 3, "")]


def test_last_column_wraps_to_the_width() -> None:
    """Continuation lines stand under their column and no line is longer than the terminal."""
    lines = table(("operator", "ok", "why"), ROWS, width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[2] == "rms_norm  yes  because the policy asks"
    assert lines[3] == " " * 15 + "for it by name"
    assert lines[-1] == "topk      3"


def test_nothing_wraps_without_a_terminal() -> None:
    """A log has one line per row; so has a terminal that is too narrow to help."""
    for width in (0, 30):
        lines = table(("operator", "ok", "why"), ROWS, width=width).splitlines()
        assert len(lines) == 4
        assert lines[2].endswith("asks for it by name")


def test_header_alone() -> None:
    """No rows, no failure."""
    assert table(("a", "b"), [], width=80) == "a  b\n-  -"
