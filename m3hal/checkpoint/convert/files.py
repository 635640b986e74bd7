"""Disk: sources that are only ever read, outputs that get their name when every byte is safe."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from m3hal.checkpoint.convert.errors import ConversionError
from m3hal.checkpoint.convert.quark import Located

# Larger writes make Linux hunt for huge pages: with two workers they cost twice the time.
_PIECE = 256 << 10
_FLUSH = 64 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Sources:
    """The source's shards, opened read-only when first needed. Reads, not maps: a truncated file is then an error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(self, located: Located, start: int, size: int) -> npt.NDArray[np.uint8]:
        """size bytes of a tensor, from its byte start on."""
        out = np.empty(size, np.uint8)
        self.read_into(located, start, out)
        return out

    def read_into(self, located: Located, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Fills out. Raises ConversionError when the file has become shorter or can't be read."""
        view, done = out.data.cast("B"), 0
        path = self._folder / located.shard
        try:
            if located.shard not in self._files:
                self._files[located.shard] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            while done < len(view):
                got = os.preadv(self._files[located.shard], [view[done:]], located.tensor.start + start + done)
                if not got:
                    raise ConversionError(f"{path} ends inside {located.tensor.name}; download it again")
                done += got
        except OSError as error:
            raise ConversionError(f"{path} can't be read: {error.strerror}") from None


class Output:
    """A file under a temporary name, of a size known from the start; :meth:`commit` makes it durable and names it."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._partial = partial_path(path)
        with _writing(path, size):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
            self._file = os.open(self._partial, flags, 0o666)
            os.truncate(self._partial, size)
        self._size, self._since_flush = size, 0

    def write(self, start: int, data: bytes | npt.NDArray[Any]) -> int:
        """Writes all of data at byte start and returns how much that was."""
        view, done = (memoryview(data) if isinstance(data, bytes) else data.data.cast("B")), 0
        with _writing(self.path, self._size):
            while done < len(view):
                done += os.pwrite(self._file, view[done : done + _PIECE], start + done)
            self._since_flush += done
            if self._since_flush >= _FLUSH:
                self._since_flush = 0
                _forget(self._file)
        return done

    def commit(self) -> None:
        """fsync, close, rename, fsync of the folder."""
        with _writing(self.path, self._size):
            os.fsync(self._file)
            os.close(self._file)
            os.rename(self._partial, self.path)
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes the temporary file."""
        os.close(self._file)
        self._partial.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """The temporary name of a file."""
    return path.with_name(path.name + ".partial")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """A JSON file, whole or not there."""
    write_bytes(path, (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """A file, whole or not there."""
    output = Output(path, len(data))
    output.write(0, data)
    output.commit()


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _forget(file: int) -> None:
    """Starts writing back what is dirty and frees what is clean: fsync then finds little left, memory stays free."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _writing(path: Path, size: int) -> Iterator[None]:
    """Says what a failed write means."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ConversionError(
                f"no room for {path.name} ({size / 1e9:.3g} GB) in {path.parent}: {error.strerror}; make room, then "
                "continue with --resume"
            ) from None
        raise ConversionError(f"{path} can't be written: {error.strerror}") from None
