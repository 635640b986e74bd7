"""Cases asked by several processes at once: a device waits less, and the compilers of kernels use more cores.

Each process meets the backend through a runner of its own. Cases are handed out one by one, in order, so the processes
end together; results come back in the order of the cases.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields

from m3hal.dispatch import M3halError
from m3hal_conformance.case import Case
from m3hal_conformance.results import Result
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import all_cases

_RUNNER: list[Runner] = []
#: a case's result, and what its runner learned of freedoms that were needed
Answer = tuple[Result, frozenset[str]]


def run(
    runner: Runner, cases: Sequence[Case], jobs: int, progress: Callable[[Case, Result], None] | None = None
) -> list[Result]:
    """As ``runner.run``, by up to ``jobs`` processes. Raises M3halError when one of them ends without an answer.

    One a case and a core is the most: each imports torch, and more only wait for each other.
    """
    jobs = min(jobs, len(cases), max(2, _cores()))
    if jobs <= 1:
        return runner.run(cases, progress)
    given = {field.name: getattr(runner, field.name) for field in fields(runner) if field.init and field.repr}
    results = []
    context = multiprocessing.get_context("spawn")  # a device's runtime does not survive a fork
    pool = ProcessPoolExecutor(jobs, context, _begin, (given,))
    try:
        asked = [(case, pool.submit(_ask, case.id)) for case in cases]
        for case, answer in asked:
            result, needed = _answered(case, answer)
            runner.needed_freedom |= needed
            results.append(result)
            if progress:
                progress(case, result)
    finally:
        pool.shutdown(cancel_futures=True)  # of an interrupted run no case is begun any more
    return results


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _answered(case: Case, answer: Future[Answer]) -> Answer:
    try:
        return answer.result()
    except BrokenProcessPool as error:
        raise M3halError(
            f"a process of the suite ended while it asked {case.id} or one of the cases after it. A backend may have "
            "ended it; with --jobs 1 the command says at which case."
        ) from error


def _begin(given: dict[str, object]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _RUNNER[:] = [Runner(**given)]  # type: ignore[arg-type]


def _end_with_parent() -> None:
    """A parent that is killed tells nobody, and its processes would wait for cases for ever."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


def _ask(identity: str) -> Answer:
    (runner,) = _RUNNER
    (case,) = (case for case in all_cases() if case.id == identity)
    (result,) = runner.run([case])
    return result, frozenset(runner.needed_freedom)
