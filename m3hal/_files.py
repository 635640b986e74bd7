"""Files that are there whole or not at all, and JSON that somebody else wrote."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes beside the target and renames, so that no reader meets a part of it. Raises OSError.

    A link stays one: what it points to is replaced. A file that was there keeps its mode. What is no regular file, such
    as ``/dev/stdout`` or a pipe, is written into, as a rename would put a file in its place.
    """
    data = content.encode() if isinstance(content, str) else content
    mode = _mode(path)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if mode and not stat.S_ISREG(mode):  # by its own name: a pipe that /dev/stdout leads to has no other
        with open(path, "wb") as file:
            file.write(data)
        return
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".m3hal-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode:
            os.chmod(beside, stat.S_IMODE(mode))
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _mode(path: str | Path) -> int:
    """What the path leads to, and who may read it; 0 when nothing is there. Raises OSError for a loop of links."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return 0


def parsed(text: str | bytes) -> Any:
    """What a JSON text says. Raises ValueError, also for one that is nested too deeply, or says a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it says {next(name for name in names if names.count(name) > 1)!r} twice")
    return found
