"""What survives a kill: which shards are finished, and of which conversion."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from m3hal.checkpoint.convert.errors import ConversionError
from m3hal.checkpoint.convert.files import sync_folder
from m3hal.checkpoint.convert.plan import Shard
from m3hal.checkpoint.convert.profiles import Profile
from m3hal.checkpoint.convert.quark import Source
from m3hal.checkpoint.convert.shard import ShardReport


class Journal:
    """Lines of JSON: the first says what is converted into what, each further one names a finished shard.

    A line is appended after its shard has its name, so a shard without a line is written again. A line torn by a kill
    is ignored.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path, self._identity = path, dict(identity)
        self.finished: dict[str, ShardReport] = {}

    def start(self) -> None:
        """A new journal."""
        self._path.unlink(missing_ok=True)
        self._append(self._identity)
        sync_folder(self._path.parent)

    def resume(self, source: Source, shards: tuple[Shard, ...], folder: Path) -> None:
        """Takes over the shards that are finished, whole, and made from files that haven't changed since."""
        lines = _lines(self._path)
        if not lines:
            return self.start()
        if lines[0] != self._identity:
            changed = sorted(key for key in self._identity if lines[0].get(key) != self._identity[key])
            raise ConversionError(
                f"{self._path.parent} was begun with another {' and '.join(changed)}; delete it to start again"
            )
        wanted = {shard.name: shard for shard in shards}
        for line in lines[1:]:
            try:
                report = ShardReport(**line["report"])
                shard, exponents = wanted[report.name], {int(k): int(n) for k, n in report.scale_exponents.items()}
                whole = line["sources"] == made_from(source, shard) and line["written"] == _stamp(folder / shard.name)
            except (KeyError, TypeError, ValueError, AttributeError, FileNotFoundError):
                continue  # no line of ours, or its shard is gone: written again
            if whole:
                self.finished[shard.name] = replace(report, scale_exponents=exponents)

    def finish(self, source: Source, shard: Shard, report: ShardReport, folder: Path) -> None:
        """Records a shard that has its final bytes and its name."""
        written = _stamp(folder / shard.name)
        self._append({"report": asdict(report), "sources": made_from(source, shard), "written": written})
        self.finished[shard.name] = report

    def _append(self, values: Mapping[str, Any]) -> None:
        with open(self._path, "ab") as file:
            torn = file.tell() and self._path.read_bytes()[-1:] != b"\n"
            file.write(b"\n" * bool(torn) + json.dumps(values).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def identity(source: Source, profile: Profile, version: str) -> dict[str, Any]:
    """What two runs must agree on to be one conversion."""
    headers = {name: hashlib.sha256(header.raw).hexdigest() for name, header in source.shards.items()}
    return {"version": version, "profile": profile.name, "config": source.config, "source shards": headers}


def made_from(source: Source, shard: Shard) -> dict[str, list[int]]:
    """Size in bytes and time of change in nanoseconds of the source files behind a shard."""
    names = {shard.name} | {where.shard for matrix in shard.matrices for where in (matrix.codes, matrix.scales)}
    return {name: _stamp(source.folder / name) for name in sorted(names)}


def _stamp(path: Path) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict):
            found.append(values)
    return found
