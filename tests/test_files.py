"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m3hal._files import parsed, write_whole


def test_standard_output_that_is_a_pipe(tmp_path: Path) -> None:
    """What /dev/stdout leads to has a name that no folder holds."""
    code = "from m3hal._files import write_whole; write_whole('/dev/stdout', 'plan')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr, list(tmp_path.iterdir())) == ("plan", "", [])


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of a file, and nothing beside it."""
    target = tmp_path / "plan.json"
    write_whole(target, "one")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(target, b"two")
    assert (target.read_text(), list(tmp_path.iterdir())) == ("one", [target])


def test_a_link_stays_a_link_and_a_mode_stays(tmp_path: Path) -> None:
    """What the link points to gets the content, and who could not read it still can't."""
    target, link, dangling = tmp_path / "plan.json", tmp_path / "link", tmp_path / "dangling"
    target.write_text("one")
    target.chmod(0o600)
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "new.json")
    write_whole(link, "two")
    write_whole(dangling, "three")
    assert link.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("two", 0o600)
    assert dangling.is_symlink()
    assert (tmp_path / "new.json").read_text() == "three"


def test_what_is_no_regular_file_is_written_into(tmp_path: Path) -> None:
    """A pipe, as a terminal or /dev/null, is still there afterwards."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "plan")
        assert os.read(reader, 99) == b"plan"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_new_file_is_as_open_as_the_user_makes_files(tmp_path: Path) -> None:
    """The umask decides."""
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "plan.json", "one")
    finally:
        os.umask(before)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["loop", "folder"])
def test_nothing_that_holds_no_content_is_replaced(tmp_path: Path, name: str) -> None:
    """A link to itself and a folder are errors, and nothing is left beside them."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"symbolic links|Is a directory"):
        write_whole(tmp_path / name, "plan")
    assert {path.name for path in tmp_path.iterdir()} == {"loop", "folder"}


def test_the_longest_name_is_possible(tmp_path: Path) -> None:
    """The file beside does not add to it."""
    write_whole(tmp_path / ("x" * 255), "plan")
    assert [path.name for path in tmp_path.iterdir()] == ["x" * 255]


@pytest.mark.parametrize(
    ("text", "told"), [("[" * 100_000, "too deeply"), ('{"a": [{"b": 1, "b": 2}]}', "'b' twice"), ("{", "Expecting")]
)
def test_what_json_can_hide_is_refused(text: str, told: str) -> None:
    """A key that hides another, and a nesting that ends Python's stack, are ValueErrors as any slip is."""
    with pytest.raises(ValueError, match=told):
        parsed(text)
    assert parsed('{"a": {"b": [1]}, "b": null}') == {"a": {"b": [1]}, "b": None}
