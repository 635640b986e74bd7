"""kill -9 at any moment, then --resume: the same bytes as without."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from m3hal.checkpoint.convert import GAUDI2, HOPPER, ConversionError, convert, run
from m3hal.checkpoint.convert.journal import Journal
from m3hal.checkpoint.synthetic import Synthetic, write
from m3hal.cli import main
from tests.checkpoint.conftest import SMALL, digest

#: fewer, smaller shards than SMALL: what is tested is the moments between writes
TINY = Synthetic(**{**vars(SMALL), "layers": 2, "experts": 2, "vocab": 8, "shard_bytes": 70_000})
_FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven shards."""
    return write(tmp_path_factory.mktemp("tiny") / "source", TINY)


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an undisturbed conversion writes."""
    return digest(convert(tiny, tmp_path_factory.mktemp("whole") / "fp8", GAUDI2).target)


def child(source: Path, target: Path, workers: int, before: Callable[[], None] = lambda: None) -> None:
    """A conversion in a process of its own, quiet, in a process group of its own."""
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    before()
    convert(source, target, GAUDI2, workers=workers, resume=True)


def attempt(source: Path, target: Path, workers: int, delay: float, group: bool) -> bool:
    """Starts, kills after a while the process or its whole group, and says whether it was killed before its end."""
    process = _FORK.Process(target=child, args=(source, target, workers))
    process.start()
    process.join(delay)
    if process.exitcode is None:
        with contextlib.suppress(ProcessLookupError):
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL) if group else os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.parametrize("wanted", [15, pytest.param(55, marks=pytest.mark.slow)])
def test_random_kills(tiny: Path, whole: dict[str, str], tmp_path: Path, wanted: int) -> None:
    """Chains of kills at random moments, of the process alone (its workers orphaned) or of all, until one finishes."""
    rng = random.Random(7)
    start = time.monotonic()
    convert(tiny, tmp_path / "timed", GAUDI2, workers=2)
    usual = time.monotonic() - start
    kills = chains = 0
    while kills < wanted:
        target = tmp_path / f"chain{chains}"
        while attempt(tiny, target, rng.choice((1, 2)), rng.uniform(0.02, 0.8 * usual), rng.random() < 0.5):
            kills += 1
            assert not target.exists() or digest(target) == whole
        convert(tiny, target, GAUDI2, resume=True)  # removes what a kill after the last rename leaves
        assert digest(target) == whole
        assert not target.with_name(target.name + ".converting").exists()
        shutil.rmtree(target)
        chains += 1
    assert chains >= (2 if wanted > 50 else 1)


STEPS = ("rename", "fsync", "pwrite", "unlink", "rmdir")


def die_at(step: int) -> None:
    """Makes this process, not its workers, kill itself instead of its n-th operation that changes the disk."""
    me, count = os.getpid(), 0

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def operation(*args: object, **keywords: object) -> object:
            nonlocal count
            if os.getpid() == me:
                count += 1
                if count == step:
                    os.kill(me, signal.SIGKILL)
            return real(*args, **keywords)

        return operation

    for name in STEPS:
        setattr(os, name, dying(getattr(os, name)))


def test_a_kill_before_every_step_of_the_main_process(tiny: Path, whole: dict[str, str], tmp_path: Path) -> None:
    """Each fsync, rename, write and removal in turn is where it ends; no target then, or the whole one."""
    step, killed = 0, True
    while killed:
        step += 1
        target = tmp_path / f"step{step}"
        process = _FORK.Process(target=child, args=(tiny, target, 2, partial(die_at, step)))
        process.start()
        process.join()
        killed = process.exitcode == -signal.SIGKILL
        assert killed or process.exitcode == 0
        assert not target.exists() or digest(target) == whole, step
        convert(tiny, target, GAUDI2, resume=True)
        assert digest(target) == whole, step
        shutil.rmtree(target)
    assert step > 15


def stop_after(shards: int, monkeypatch: pytest.MonkeyPatch, source: Path, target: Path) -> None:
    """A run that fails when it has finished some shards."""
    finish = Journal.finish

    def failing(self: Journal, *args: object) -> None:
        finish(self, *args)  # type: ignore[arg-type]
        if len(self.finished) == shards:
            raise ConversionError("stopped by the test")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", failing)
        with pytest.raises(ConversionError, match="stopped"):
            convert(source, target, GAUDI2)


def test_finished_shards_are_not_written_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, then the others."""
    stop_after(3, monkeypatch, tiny, tmp_path / "fp8")
    done = convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)
    assert (done.fresh, done.shards) == (done.shards - 3, done.shards)


def test_a_torn_journal_line_is_ignored(
    tiny: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard is written again, and later lines still count."""
    stop_after(3, monkeypatch, tiny, tmp_path / "fp8")
    journal = tmp_path / "fp8.converting" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    done = convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)
    assert done.fresh == done.shards - 2
    assert digest(tmp_path / "fp8") == whole


@pytest.mark.parametrize("damage", ["shortened", "removed"])
def test_a_finished_shard_that_is_not_whole_is_written_again(
    tiny: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The journal's word is checked against the disk."""
    stop_after(3, monkeypatch, tiny, tmp_path / "fp8")
    shard = sorted((tmp_path / "fp8.converting" / "checkpoint").glob("*.safetensors"))[0]
    os.truncate(shard, 100) if damage == "shortened" else shard.unlink()
    convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)
    assert digest(tmp_path / "fp8") == whole


def test_a_source_downloaded_again_is_converted_again(
    tiny: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard whose source file has changed since is not trusted."""
    own = Path(shutil.copytree(tiny, tmp_path / "own"))
    stop_after(3, monkeypatch, own, tmp_path / "fp8")
    for shard in own.glob("*.safetensors"):
        os.utime(shard)
    done = convert(own, tmp_path / "fp8", GAUDI2, resume=True)
    assert done.fresh == done.shards
    assert digest(tmp_path / "fp8") == whole


def test_another_profile_is_not_a_continuation(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a checkpoint for each machine would be neither."""
    stop_after(3, monkeypatch, tiny, tmp_path / "fp8")
    with pytest.raises(ConversionError, match="begun with another profile"):
        convert(tiny, tmp_path / "fp8", HOPPER, resume=True)


def test_one_at_a_time(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run into the same target waits a little, then says so."""
    stop_after(1, monkeypatch, tiny, tmp_path / "fp8")
    paths = run.Paths(tiny, tmp_path / "fp8")
    monkeypatch.setattr(run, "_LOCK_PATIENCE", 0.1)
    with run._working(paths, True), pytest.raises(ConversionError, match="another process is converting"):
        convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_source_where_the_work_folder_would_be_is_refused(tiny: Path, tmp_path: Path, inside: str) -> None:
    """A source named TARGET.converting, or in such a folder, is not taken for an unfinished conversion and removed."""
    own = Path(shutil.copytree(tiny, tmp_path / "fp8.converting" / inside))
    for resume in (False, True):
        with pytest.raises(ConversionError, match="name another target"):
            convert(own, tmp_path / "fp8", GAUDI2, resume=resume)
    assert digest(own) == digest(tiny)


def test_a_strangers_folder_is_not_continued(tiny: Path, tmp_path: Path) -> None:
    """TARGET.converting with other files than a conversion's: nothing of it is removed."""
    (tmp_path / "fp8.converting").mkdir()
    (tmp_path / "fp8.converting" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConversionError, match="other files"):
        convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)
    assert (tmp_path / "fp8.converting" / "thesis.tex").exists()


def test_a_complete_target_of_another_profile_is_not_this_ones_success(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--resume finds a complete target only if it is what was asked for; it has then checked no checksum itself."""
    convert(tiny, tmp_path / "fp8", GAUDI2)
    with pytest.raises(ConversionError, match="complete, with another profile"):
        convert(tiny, tmp_path / "fp8", HOPPER, resume=True)
    again = convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)
    assert (again.fresh, again.checked) == (0, 0)
    assert main(["convert", "mxfp4-to-fp8", str(tiny), str(tmp_path / "fp8"), "--profile", "gaudi2", "--resume"]) == 0
    assert "all shards were there already" in capsys.readouterr().out
    (tmp_path / "fp8" / "m3hal_conversion.json").write_text("[")
    with pytest.raises(ConversionError, match="complete, with another made_by"):
        convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)


@pytest.mark.parametrize(
    "line", ["7", "{}", '{"report": 3}', '{"report": {"name": "model-1"}, "sources": {}}', '{"report": {"nam": 1}}']
)
def test_foreign_journal_lines_are_ignored(
    tiny: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """JSON that is no line of ours, between lines that are."""
    stop_after(2, monkeypatch, tiny, tmp_path / "fp8")
    journal = tmp_path / "fp8.converting" / "journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    done = convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)
    assert done.fresh == done.shards - 2
    assert digest(tmp_path / "fp8") == whole


def test_a_finished_shard_that_was_written_to_since_is_written_again(
    tiny: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the right size, with other bytes."""
    stop_after(3, monkeypatch, tiny, tmp_path / "fp8")
    shard = sorted((tmp_path / "fp8.converting" / "checkpoint").glob("*.safetensors"))[0]
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    done = convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)
    assert done.fresh == done.shards - 2
    assert digest(tmp_path / "fp8") == whole


def test_a_run_that_waited_for_another_does_not_work_in_its_removed_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock it got in the end is no longer the work folder's."""
    stop_after(1, monkeypatch, tiny, tmp_path / "fp8")
    take = run._take

    def slowly(lock: int, paths: run.Paths) -> None:
        monkeypatch.setattr(run, "_take", take)
        convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)
        take(lock, paths)

    monkeypatch.setattr(run, "_take", slowly)
    with pytest.raises(ConversionError, match="just finished"):
        convert(tiny, tmp_path / "fp8", GAUDI2, resume=True)
