"""Times candidates in turn, so that a drift of the clocks meets all alike, and takes each one's median.

On a GPU ``chained`` is the replay of a graph that chains calls over rotating inputs, so that no call finds its data in
the cache and no launch waits for the host. Kernels that are launched while the one ahead still runs overlap there with
the call before, which in a model is another operator's; ``apart`` puts a small kernel that allows no overlap between
calls, and takes off the time of a graph of such kernels alone. ``single`` is the time between two events around one
call behind a flush of the cache, while the GPU is kept busy until the host has launched it. On a CPU all are the time
of calls, and so they are on other accelerators, whose work is waited for once a measurement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from m3hal_conformance.bench.work import Call, Work

#: calls of one graph, or of one measurement on a CPU
CHAIN = 32
#: clock cycles, about 2 ms
BUSY = 4_000_000


def measure(work: Work, device: torch.device, runs: int, apart: bool = False) -> dict[str, list[float]]:
    """Microseconds a call of every candidate, ``runs`` interleaved runs each. apart: of chained calls, each alone."""
    if work.timing == "host":
        timed = {name: _host(calls[0], device) for name, calls in work.calls.items()}
    elif device.type != "cuda":
        timed = {name: _looped(calls, device) for name, calls in work.calls.items()}
    elif work.timing == "chained":
        between = torch.zeros(1, device=device).zero_ if apart else None
        timed = {name: _replayed(calls, between) for name, calls in work.calls.items()}
    else:
        flush = torch.empty(64 << 20, dtype=torch.int32, device=device)
        timed = {name: _alone(calls[0], flush) for name, calls in work.calls.items()}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(runs):
        for name, once in timed.items():
            times[name].append(once())
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in times.items()}


def warm(calls: Mapping[str, Sequence[Call]], device: torch.device) -> None:
    """Compiles, and brings every plan to where it is from a model's third layer on: what it launches is known then."""
    for functions in calls.values():
        for function in (*functions, *functions):
            function()
    wait(device)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type != "cpu":
        try:
            torch.accelerator.synchronize(device)
        except RuntimeError:  # an extension need not have it; what is read comes after what was given before
            torch.empty(1, device=device).cpu()


def events(function: Call, times: int = 1) -> float:
    """Microseconds of GPU time a call."""
    make: Any = torch.cuda.Event
    begin, end = make(enable_timing=True), make(enable_timing=True)
    begin.record()
    for _ in range(times):
        function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / times


def launches(function: Call) -> int:
    """Kernels that a call launches on the GPU."""
    profiler: Any = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events())


def _replayed(calls: Sequence[Call], between: Call | None = None) -> Callable[[], float]:
    chain = (list(calls) * (CHAIN // len(calls) + 1))[: max(CHAIN, len(calls))]
    replay = _captured(chain if between is None else [each for call in chain for each in (call, between)])
    if between is None:
        return lambda: events(replay, 3) / len(chain)
    rest = _captured([between] * len(chain))
    return lambda: (events(replay, 3) - events(rest, 3)) / len(chain)


def _captured(calls: Sequence[Call]) -> Call:
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in calls:
            function()
    graph.replay()
    replay: Call = graph.replay
    return replay


def _alone(function: Call, flush: torch.Tensor) -> Callable[[], float]:
    def once() -> float:
        flush.zero_()
        torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
        return events(function)

    return once


def _looped(calls: Sequence[Call], device: torch.device) -> Callable[[], float]:
    def once() -> float:
        begin = time.perf_counter()
        for function in calls:
            function()
        wait(device)
        return (time.perf_counter() - begin) / len(calls) * 1e6

    return once


def _host(function: Call, device: torch.device, calls: int = 20) -> Callable[[], float]:
    """The median of a few calls: the host of a GPU is shared, and some calls wait for it."""

    def once() -> float:
        found = []
        for _ in range(calls):
            begin = time.perf_counter()
            function()
            found.append(time.perf_counter() - begin)
            wait(device)
        return statistics.median(found) * 1e6

    return once


def ceilings(device: torch.device) -> dict[str, float]:
    """What the device does at most: GB/s of a large copy (read + write) and of reading, TFLOP/s of matrix products."""
    gpu = device.type == "cuda"
    size, side = (1 << 26, 512) if device.type == "cpu" else (1 << 32, 8192)  # bytes: its start and end must not show
    clock: Callable[[Call], float] = (lambda f: events(f, 5)) if gpu else (lambda f: _looped([f] * 3, device)())

    def fastest(function: Call) -> float:
        function()
        return statistics.median(clock(function) for _ in range(5))

    source, target = (torch.ones(size // 4, dtype=torch.float32, device=device) for _ in range(2))
    found = {"copy_GBps": 2 * size / fastest(lambda: target.copy_(source)) / 1e3}
    found["read_GBps"] = max(found["copy_GBps"], size / fastest(lambda: source.sum()) / 1e3)
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    x, y = a.bfloat16(), b.bfloat16()
    found["bfloat16_TFLOPs"] = 2 * side**3 / fastest(lambda: x @ y) / 1e6
    if gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        p, q = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        product = lambda: torch._scaled_mm(p, q, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
        found["float8_TFLOPs"] = 2 * side**3 / fastest(product) / 1e6
    return found
