"""Runs a command in a process of its own and tells how that process ended.

A vendor's code may end the process it runs in: it calls ``os._exit(0)``, or crashes. Then nobody would be left to say
that the suite never finished, and exit code 0 would read as a pass.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

#: names the file in which the child notes what it is at, and at last its exit code
DIARY = "_M3HAL_CONFORM_DIARY"
_END = "end "
#: what ends a command from outside: a time limit, a terminal that is closed
_STOPS = (signal.SIGTERM, signal.SIGHUP)


def supervised(argv: Sequence[str]) -> int:
    """``m3hal ARGV`` in a child with this process' streams, which does not outlive it.

    Returns its exit code; 1 when it ended without noting one.
    """
    handle, name = tempfile.mkstemp(prefix="m3hal-conform-")
    os.close(handle)
    diary = Path(name)
    child = subprocess.Popen([sys.executable, "-m", "m3hal", *argv], env={**os.environ, DIARY: name})
    heard = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
    before = {number: signal.signal(number, lambda number, frame: child.send_signal(number)) for number in heard}
    try:
        status = _wait(child)
        last = diary.read_text(errors="replace").splitlines()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        diary.unlink(missing_ok=True)
    if last and last[-1].startswith(_END):
        return int(last[-1].removeprefix(_END))
    if status in (-signal.SIGINT, *(-number for number in _STOPS)):
        return 128 - status  # stopped from outside, as a shell tells it
    if status > 0 and not last:
        return status  # it ended before the suite began, and said why
    where = f" while it asked {last[-1]}" if last else ""
    print(
        f"m3hal: the suite's process ended{where}: {_how(status)}. A backend may have ended it; nothing was written.",
        file=sys.stderr,
    )
    return 1


def note(text: str) -> None:
    """What the suite is at: the last line tells where a process ended that says nothing any more."""
    name = os.environ.get(DIARY)
    if name:
        Path(name).write_text(text + "\n")


def note_end(code: int) -> None:
    """The run is over, and this is its exit code, whatever ends the process later."""
    note(f"{_END}{code}")


def _wait(child: subprocess.Popen[bytes]) -> int:
    """The child's status; an interrupt of the terminal reaches it by itself, and it tidies up."""
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue


def _how(status: int) -> str:
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status} before the last case"
