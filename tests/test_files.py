"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from m3hal._files import write_whole


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of a file, and nothing beside it."""
    target = tmp_path / "plan.json"
    write_whole(target, "one")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(target, b"two")
    assert (target.read_text(), list(tmp_path.iterdir())) == ("one", [target])
