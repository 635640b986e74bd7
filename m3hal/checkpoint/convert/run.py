"""The whole conversion: what can be resumed, and a target folder that appears when it is complete, not before."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
_OURS = {"checkpoint", "journal.jsonl", "lock"}  # what lies in the work folder
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
    def lock(self) -> Path:
        """Held while a run works."""
        return self.work / "lock"

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
    try:
        fresh = _complete(paths, source, shards, profile, expected, workers, resume)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ConversionError(
            f"{paths.target} can't be completed: {where}{error.strerror}; mend that, then continue with --resume"
        ) from None
    checked = len(fresh & expected.keys())
    size = sum(shard.size for shard in shards)
    return Done(paths.target, len(shards), len(fresh), checked, size, time.monotonic() - start)


def _complete(
    paths: Paths,
    source: Source,
    shards: tuple[Shard, ...],
    profile: Profile,
    expected: dict[str, str],
    workers: int,
    resume: bool,
) -> set[str]:
    """Names of the shards that this run wrote; none when the target was complete already."""
    names = identity(source, profile, __version__)
    if is_complete(paths, names, resume):
        if paths.work.exists():
            with _working(paths, resume):
                _remove(paths)
        return set()
    with _working(paths, resume):
        journal = Journal(paths.journal, names)
        journal.resume(source, shards, paths.checkpoint) if resume else journal.start()
        fresh = {shard.name for shard in shards}.difference(journal.finished)
        _convert_shards(paths, source, shards, profile, journal, expected, workers)
        _write_rest(paths, source, shards, profile, journal)
        os.rename(paths.checkpoint, paths.target)
        sync_folder(paths.target.parent)
        _remove(paths)
    return fresh


def resolve(folder: Path, target: Path) -> Paths:
    """Absolute paths. Raises ConversionError where writing the target, or clearing up after it, would touch SRC."""
    paths = Paths(folder.resolve(), target.resolve())
    if paths.target.is_relative_to(paths.source):
        raise ConversionError(f"{target} lies inside {folder}, which is only read; name a folder elsewhere")
    if paths.source.is_relative_to(paths.work):
        raise ConversionError(f"{folder} lies in {paths.work}, where the conversion would work; name another target")
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


def require_usable(paths: Paths, resume: bool) -> None:
    """Raises ConversionError for a work folder that is another's, or an unfinished conversion without ``resume``."""
    if not paths.work.exists():
        return
    if not {path.name for path in paths.work.iterdir()} <= _OURS:
        raise ConversionError(f"{paths.work} holds other files than a conversion's; move it away, or name a new folder")
    if not resume:
        raise ConversionError(f"{paths.work} holds an unfinished conversion; continue it with --resume, or delete it")


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


def is_complete(paths: Paths, names: Mapping[str, Any], resume: bool) -> bool:
    """Whether the target is there already, of this conversion. Raises ConversionError when it is another's."""
    if not paths.target.exists():
        return False
    if resume and (paths.target / written.RECORD).exists():  # killed after the last rename, if at all
        found, want = _record(paths), written.record(names, ())
        changed = [key for key in ("made_by", "profile", "source_header_sha256") if found.get(key) != want[key]]
        if not changed:
            return True
        raise ConversionError(f"{paths.target} is complete, with another {' and '.join(changed)}; name a new folder")
    if paths.target.is_dir() and not any(paths.target.iterdir()):
        return False
    raise ConversionError(f"{paths.target} exists; name a new folder, or delete it")


def _record(paths: Paths) -> dict[str, Any]:
    try:
        found = json.loads((paths.target / written.RECORD).read_bytes())
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _remove(paths: Paths) -> None:
    """What this conversion made beside the target, and nothing that it didn't. Called with the lock held."""
    shutil.rmtree(paths.checkpoint, ignore_errors=True)
    paths.journal.unlink(missing_ok=True)
    paths.lock.unlink(missing_ok=True)
    with suppress(OSError):
        paths.work.rmdir()


@contextmanager
def _working(paths: Paths, resume: bool) -> Iterator[None]:
    """The work folder, with a lock that dies with the last process of a run, without what a killed run left open."""
    require_usable(paths, resume)
    paths.checkpoint.mkdir(parents=True, exist_ok=True)
    with open(paths.lock, "w") as lock:
        _take(lock.fileno(), paths)
        if not paths.lock.exists() or not os.path.samestat(os.fstat(lock.fileno()), paths.lock.stat()):
            raise ConversionError(f"another process has just finished in {paths.work}; look at {paths.target}")
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
        lambda shard, report: journal.finish(source, shard, report, paths.checkpoint),
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
