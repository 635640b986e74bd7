"""How far a conversion is, for people."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_BAR = 24


class ProgressBar:
    """One line that is rewritten on a terminal; elsewhere a line every half minute.

    The rate is that of this run: bytes that a resumed run found finished count as done, not as fast.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total, self._stream = total, stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._start = self._last = time.monotonic()
        self._found = self._done = 0

    def found(self, size: int) -> None:
        """Bytes that an earlier run wrote."""
        self._found += size

    def add(self, size: int) -> None:
        """Bytes written since the last call."""
        self._done += size
        now = time.monotonic()
        if now - self._last >= (0.2 if self._terminal else 30):
            self._last = now
            self._show(now - self._start)

    def close(self) -> None:
        """The last line."""
        self._show(time.monotonic() - self._start)
        if self._terminal:
            print(file=self._stream)

    def _show(self, seconds: float) -> None:
        line = describe(self._total, self._found, self._done, seconds)
        print(f"\r{line}\033[K" if self._terminal else line, end="" if self._terminal else "\n", file=self._stream)
        self._stream.flush()


def describe(total: int, found: int, done: int, seconds: float) -> str:
    """``[####----]  47 %  195 of 412 GB  612 MB/s  5 min 53 s left``."""
    share = (found + done) / total if total else 1.0
    bar = "#" * int(share * _BAR)
    rate = done / seconds if seconds > 0 else 0.0
    left = duration((total - found - done) / rate) + " left" if rate else ""
    sizes = f"{(found + done) / 1e9:.3g} of {total / 1e9:.3g} GB"
    return f"[{bar:-<{_BAR}}] {share:4.0%}  {sizes}  {rate / 1e6:.0f} MB/s  {left}".rstrip()


def duration(seconds: float) -> str:
    """``3 h 05 min``, ``5 min 53 s``, ``12 s``."""
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"
