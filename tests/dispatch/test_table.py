"""Tables for terminals, logs and pipes."""

from __future__ import annotations

from m3hal.dispatch.table import folded, table

ROWS = [("rms_norm", True, "because the policy asks for it by name"), ("topk", 3, "")]


def test_the_widest_columns_wrap_to_the_width() -> None:
    """Continuation lines stand under their column and no line is longer than the terminal."""
    lines = table(("operator", "ok", "why"), ROWS, width=40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[2] == "rms_norm  yes  because the policy asks"
    assert lines[3] == " " * 15 + "for it by name"
    assert lines[-1] == "topk      3"


def test_every_column_can_wrap() -> None:
    """A column in the middle too, between words alone."""
    rows = [("rms_norm", "dense_attention, sparse_attention, dense_mlp, moe", "gemma_rmsnorm on copies")]
    lines = table(("operator", "sites", "served by"), rows, width=56).splitlines()
    assert max(map(len, lines)) <= 56
    assert lines[2:] == [
        "rms_norm  dense_attention,        gemma_rmsnorm on",
        "          sparse_attention,       copies",
        "          dense_mlp, moe",
    ]


def test_no_word_is_broken() -> None:
    """A terminal that is narrower than the words gets lines that are longer than it."""
    lines = table(("operator", "ok", "why"), ROWS, width=5).splitlines()
    assert [line[15:] for line in lines[2:7]] == ["because", "the", "policy", "asks", "for it"]


def test_nothing_wraps_without_a_terminal() -> None:
    """A log has one line per row."""
    lines = table(("operator", "ok", "why"), ROWS, width=0).splitlines()
    assert len(lines) == 4
    assert lines[2].endswith("asks for it by name")


def test_header_alone() -> None:
    """No rows, no failure."""
    assert table(("a", "b"), [], width=80) == "a  b\n-  -"


def test_sentences_fold_to_the_width() -> None:
    """What is left of a line hangs below it; a log keeps one line."""
    text = "backends\n  acme: rejected at device: it runs on acme:x1\nshort"
    assert folded(text, 30).splitlines() == [
        "backends",
        "  acme: rejected at device: it",
        "      runs on acme:x1",
        "short",
    ]
    assert folded(text, 0) == text
