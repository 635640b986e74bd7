"""Running what vendors wrote."""

from __future__ import annotations

import sys
import threading

import pytest

from m3hal.dispatch.vendor import Failure, attempt


def test_result_or_failure() -> None:
    """What it returns, or what it raised, with a traceback."""
    assert attempt(divmod, 7, 2) == (3, 1)
    failure = attempt(lambda: 1 / 0)
    assert isinstance(failure, Failure)
    assert failure.reason == "raised ZeroDivisionError: division by zero"
    assert "Traceback" in failure.traceback


def test_interrupts_are_the_users() -> None:
    """Ctrl-C goes through, and leaves stdout as it was."""
    before = sys.stdout

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)
    assert sys.stdout is before


def test_stdout_comes_back_after_overlapping_threads() -> None:
    """The first in is the first out: whichever leaves last, stdout is what it was."""
    before, inside, leave = sys.stdout, threading.Barrier(2), threading.Event()
    targets = []

    def first() -> None:
        targets.append(sys.stdout)
        inside.wait(10)

    def second() -> None:
        inside.wait(10)
        leave.wait(10)

    threads = [threading.Thread(target=attempt, args=(function,)) for function in (first, second)]
    for thread in threads:
        thread.start()
    threads[0].join(10)
    leave.set()
    threads[1].join(10)
    assert targets == [sys.stderr]
    assert sys.stdout is before


def test_nested_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest that plans attempts within an attempt; afterwards printing works as before."""
    attempt(lambda: (attempt(print, "inner"), print("outer")))
    print("after")
    captured = capsys.readouterr()
    assert captured.out == "after\n"
    assert captured.err == "inner\nouter\n"
