"""Runs what vendors wrote, so that it can neither end the program nor write into what m3hal prints."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """What was raised instead of a result. reason: the end of a sentence. traceback: for ``m3hal doctor``."""

    reason: str
    traceback: str
    error: BaseException


def attempt(function: Callable[..., Result], *arguments: object) -> Result | Failure:
    """The result, or the Failure. KeyboardInterrupt is the user's, and goes through.

    Everything else is caught: sys.exit is, and panics of Rust extensions, which are no Exception. What is printed
    goes to stderr, as stdout may carry JSON.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Failure(f"raised {_told(error)}", traceback.format_exc(), error)


def _told(error: BaseException) -> str:
    """``TypeError: why``, also of an error that can't say why."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which has no readable message"
