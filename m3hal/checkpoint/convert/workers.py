"""Shards side by side: one process for each, a pipe from each, and one error that stops all."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

from m3hal.checkpoint.convert.errors import ConversionError
from m3hal.checkpoint.convert.plan import Shard
from m3hal.checkpoint.convert.profiles import Profile
from m3hal.checkpoint.convert.shard import ShardReport, convert_shard
from m3hal.checkpoint.convert.sums import check_sum


@dataclass(frozen=True)
class Job:
    """A shard to write. expected: the published SHA-256 of its source file, if known."""

    folder: Path
    target: Path
    shard: Shard
    profile: Profile
    expected: str | None


def run_jobs(
    jobs: Iterable[Job],
    workers: int,
    progress: Callable[[int], None],
    finished: Callable[[Shard, ShardReport], None],
) -> None:
    """Runs the jobs, at most ``workers`` at a time. The first error ends the others and is raised here."""
    waiting = list(jobs)[::-1]
    running: dict[Connection, tuple[BaseProcess, Job]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                process, connection = _start(job := waiting.pop())
                running[connection] = process, job
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                process, job = running[ready]
                message = _receive(ready, process, job)
                if isinstance(message, ShardReport):
                    finished(job.shard, message)
                    process.join()
                    del running[ready]
                else:
                    progress(message)
    finally:
        for process, _ in running.values():
            process.kill()
            process.join()


def _start(job: Job) -> tuple[BaseProcess, Connection]:
    context = _context()
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, send, os.getpid()), daemon=True)
    process.start()
    send.close()
    return process, receive


def _context() -> ForkContext | SpawnContext:
    """Forking spares each worker the imports."""
    if "fork" in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("fork")
    return multiprocessing.get_context("spawn")


def _receive(connection: Connection, process: BaseProcess, job: Job) -> int | ShardReport:
    try:
        message: int | ShardReport | ConversionError = connection.recv()
    except EOFError:
        process.join()
        raise ConversionError(
            f"the worker for {job.shard.name} ended with code {process.exitcode}, perhaps for lack of memory; continue "
            "with --resume and fewer --workers"
        ) from None
    if isinstance(message, ConversionError):
        raise message
    return message


def _work(job: Job, connection: Connection, parent: int) -> None:
    """A worker's life. It ends with its parent: nobody may write into a conversion that has been resumed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def progress(count: int) -> None:
        if os.getppid() != parent:
            os._exit(1)
        connection.send(count)

    try:
        check = _Check(job)
        report = convert_shard(job.folder, job.shard, job.profile, job.target, progress, before_naming=check.join)
    except ConversionError as error:
        connection.send(error)
    else:
        connection.send(report)


class _Check:
    """The source file's checksum, computed beside the conversion."""

    def __init__(self, job: Job) -> None:
        self._error: ConversionError | None = None
        self._thread = Thread(target=self._run, args=(job,), daemon=True)
        self._thread.start()

    def _run(self, job: Job) -> None:
        try:
            if job.expected is not None:
                check_sum(job.folder / job.shard.name, job.expected)
        except ConversionError as error:
            self._error = error
        except OSError as error:  # a thread's exception would be lost, and the shard named unchecked
            self._error = ConversionError(f"{job.folder / job.shard.name} can't be read: {error.strerror}")

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
