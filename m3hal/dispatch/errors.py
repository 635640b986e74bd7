"""What goes wrong before a kernel runs, said so that a person can act on it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m3hal.dispatch.verdict import Verdict


class M3halError(Exception):
    """A request that m3hal refuses; the message is a sentence with the remedy.

    verdicts: the rejections behind it, for programs.
    """

    def __init__(self, message: str, verdicts: Iterable[Verdict] = ()) -> None:
        super().__init__(message)
        self.verdicts = tuple(verdicts)


class ConfigurationError(M3halError):
    """A name, key or value that means nothing: a slip in what was asked, not a lack of what is installed."""


class UnsupportedError(M3halError):
    """What was asked for is installed, but nothing of it can run on the device."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is a near miss of, or a spelling with other capitals."""
    names = sorted(set(known))
    same = [one for one in names if one.casefold() == name.casefold()]
    return next(iter([*same, *difflib.get_close_matches(name, names, n=1, cutoff=0.6)]), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for a near miss, else the list of what is known; to end a sentence about ``name``."""
    names = sorted(set(known))
    near = nearest(name, names)
    if near:
        return f" Did you mean {near!r}?"
    return f" Known: {', '.join(names)}." if names else " None is known."
