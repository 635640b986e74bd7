"""The whole conversion: what can be resumed, and a target folder that appears when it is complete, not before."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from m3hal import __version__
from m3hal.checkpoint.convert import config as written
from m3hal.checkpoint.convert.errors import ConversionError
from m3hal.checkpoint.convert.files import Output, sync_folder, write_json
from m3hal.checkpoint.convert.journal import Journal, identity
from m3hal.checkpoint.convert.plan import Shard, plan_shards
from m3hal.checkpoint.convert.profiles import Profile
from m3hal.checkpoint.convert.progress import ProgressBar
from m3hal.checkpoint.convert.quark import INDEX, Source, open_source
from m3hal.checkpoint.convert.sums import SUMS, known_sums
from m3hal.checkpoint.convert.workers import Job, run_jobs

_LOCK_PATIENCE = 5.0  # seconds in which the workers of a killed run notice
_COPY = 8 << 20


@dataclass(frozen=True)
class Paths:
    """Where a conversion lives: everything in ``work`` until it is complete, then ``target``."""

    source: Path
    target: Path

    @property
    def work(self) -> Path:
        """``TARGET.converting``, beside the target and so on its disk."""
        return self.target.with_name(self.target.name + ".converting")

    @property
    def checkpoint(self) -> Path:
        """What becomes the target by a rename."""
        return self.work / "checkpoint"

    @property
    def journal(self) -> Path:
        """See :mod:`m3hal.checkpoint.convert.journal`."""
        return self.work / "journal.jsonl"


@dataclass(frozen=True)
class Done:
    """size: bytes of the shards. fresh: how many of them this run wrote. checked: sources whose checksum was known."""

    target: Path
    shards: int
    fresh: int
    checked: int
    size: int
    seconds: float


def convert(folder: Path, target: Path, profile: Profile, *, workers: int = 1, resume: bool = False) -> Done:
    """Converts a checkpoint into the new folder ``target``.

    resume: continue what a killed or failed run left in ``TARGET.converting``.

    Raises ConversionError; there is then no ``target``, and the finished shards wait for ``resume``.
    """
    start = time.monotonic()
    paths = resolve(folder, target)
    source = open_source(paths.source)
    shards = plan_shards(source)
    expected = known_sums(paths.source, source.shards)
    size, fresh = sum(shard.size for shard in shards), 0
    if not _is_complete(paths, resume):
        with _working(paths, resume):
            journal = Journal(paths.journal, identity(source, profile, __version__))
            journal.resume(source, shards, paths.checkpoint) if resume else journal.start()
            fresh = len(shards) - len(journal.finished)
            _convert_shards(paths, source, shards, profile, journal, expected, workers)
            _write_rest(paths, source, shards, profile, journal)
            os.rename(paths.checkpoint, paths.target)
            sync_folder(paths.target.parent)
    shutil.rmtree(paths.work, ignore_errors=True)
    return Done(paths.target, len(shards), fresh, len(expected), size, time.monotonic() - start)


def resolve(folder: Path, target: Path) -> Paths:
    """Absolute paths. Raises ConversionError for a target inside the source, which is only ever read."""
    paths = Paths(folder.resolve(), target.resolve())
    if paths.target.is_relative_to(paths.source):
        raise ConversionError(f"{target} lies inside {folder}, which is only read; name a folder elsewhere")
    return paths


def other_files(folder: Path) -> list[Path]:
    """Tokenizer, licence, template and the like, relative to the folder; not weights, config, sums, or hidden files."""
    rewritten = {"config.json", INDEX, SUMS, written.RECORD}
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [
        path
        for path in found
        if path.suffix != ".safetensors"
        and str(path) not in rewritten
        and not any(part.startswith(".") for part in path.parts)
    ]


def require_room(paths: Paths, needed: int) -> None:
    """Raises ConversionError when the target's disk has less free."""
    existing = nearest_folder(paths.target)
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConversionError(
            f"the conversion needs {needed / 1e9:.3g} GB more in {existing}, which has {free / 1e9:.3g} GB free; make "
            "room or name a folder on another disk"
        )


def nearest_folder(path: Path) -> Path:
    """The nearest folder above a path that is already there."""
    return next(parent for parent in path.parents if parent.exists())


def _is_complete(paths: Paths, resume: bool) -> bool:
    if not paths.target.exists():
        return False
    if resume and (paths.target / written.RECORD).exists():
        return True  # killed after the last rename, if at all
    if paths.target.is_dir() and not any(paths.target.iterdir()):
        return False
    raise ConversionError(f"{paths.target} exists; name a new folder, or delete it")


@contextmanager
def _working(paths: Paths, resume: bool) -> Iterator[None]:
    """The work folder, with a lock that dies with the last process of a run, without what a killed run left open."""
    if paths.work.exists() and not resume:
        raise ConversionError(f"{paths.work} holds an unfinished conversion; continue it with --resume, or delete it")
    paths.checkpoint.mkdir(parents=True, exist_ok=True)
    with open(paths.work / "lock", "w") as lock:
        _take(lock.fileno(), paths)
        for leftover in paths.checkpoint.rglob("*.partial"):
            leftover.unlink()
        yield


def _take(lock: int, paths: Paths) -> None:
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ConversionError(f"another process is converting into {paths.work}; wait for it") from None
            time.sleep(0.02)


def _convert_shards(
    paths: Paths,
    source: Source,
    shards: tuple[Shard, ...],
    profile: Profile,
    journal: Journal,
    expected: dict[str, str],
    workers: int,
) -> None:
    left = [shard for shard in shards if shard.name not in journal.finished]
    require_room(paths, sum(shard.size for shard in left))
    bar = ProgressBar(sum(shard.size for shard in shards))
    bar.found(sum(report.size for report in journal.finished.values()))
    run_jobs(
        (Job(paths.source, paths.checkpoint, shard, profile, expected.get(shard.name)) for shard in left),
        workers,
        bar.add,
        lambda shard, report: journal.finish(source, shard, report),
    )
    bar.close()


def _write_rest(paths: Paths, source: Source, shards: tuple[Shard, ...], profile: Profile, journal: Journal) -> None:
    for path in other_files(paths.source):
        (paths.checkpoint / path).parent.mkdir(parents=True, exist_ok=True)
        _copy(paths.source / path, paths.checkpoint / path)
    if source.indexed:
        write_json(paths.checkpoint / INDEX, written.index(shards))
    write_json(paths.checkpoint / "config.json", written.converted_config(source.config, profile))
    record = written.record(identity(source, profile, __version__), journal.finished.values())
    write_json(paths.checkpoint / written.RECORD, record)


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as file:
        output, start = Output(target, os.fstat(file.fileno()).st_size), 0
        while data := file.read(_COPY):
            start += output.write(start, data)
    output.commit()
