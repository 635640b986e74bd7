"""Runs what vendors wrote, so that it can neither end the program nor write into what m3hal prints."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """What was raised instead of a result. reason: the end of a sentence. traceback: for ``m3hal doctor``."""

    reason: str
    traceback: str
    error: BaseException


def attempt(function: Callable[..., Result], *arguments: object) -> Result | Failure:
    """The result, or the Failure. KeyboardInterrupt is the user's, and goes through.

    Everything else is caught: sys.exit is, and panics of Rust extensions, which are no Exception. What Python prints
    meanwhile goes to stderr, as stdout may carry JSON.
    """
    try:
        with _stdout_to_stderr():
            return function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Failure(f"raised {_told(error)}", traceback.format_exc(), error)


_lock = threading.Lock()
_stdouts: list[Any] = []


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """contextlib.redirect_stdout for threads that overlap: the last to leave restores what the first one found."""
    with _lock:
        _stdouts.append(_stdouts[0] if _stdouts else sys.stdout)
        sys.stdout = sys.stderr
    try:
        yield
    finally:
        with _lock:
            found = _stdouts.pop()
            if not _stdouts:
                sys.stdout = found


def _told(error: BaseException) -> str:
    """``TypeError: why``, also of an error that can't say why."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which has no readable message"
