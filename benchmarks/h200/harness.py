"""Timing, inputs and peers for benchmarks on an NVIDIA GPU.

Candidates of a row are timed in turn, ROUNDS times, and each gets its median: drift of the clocks hits all alike. GPU
time is the replay of a CUDA graph that chains calls over rotating inputs, so that no call finds its data in the cache;
long calls are timed one by one with events behind a cache flush.
"""

from __future__ import annotations

import inspect
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from m3hal_conformance.bench.table import Measured, to_json

from m3hal.formats import dequantize
from m3hal.layouts import KVLayout, PagedCache, page_map
from m3hal.layouts.stored import stored
from m3hal.ops import SeqMeta
from m3hal.shape import MINIMAX_M3, ModelShape, Site

ROUNDS = 7
DEVICE = "cuda"
#: compile and check only, so that all sections can warm the kernel cache side by side
WARM = os.environ.get("WARM") == "1"
ROWS: list[dict[str, object]] = []


def site(tensor_parallel: int, format: str = "bfloat16", kind: str = "sparse_attention", **bounds: int) -> Site:
    """MiniMax-M3's site on one of ``tensor_parallel`` ranks, both caches in the given format."""
    limits = {"max_tokens": 8192, "max_seqs": 64, "max_context": 524288} | bounds
    shape = ModelShape.from_config(
        MINIMAX_M3,
        dtype="bfloat16",
        page_size=128,
        tensor_parallel=tensor_parallel,
        kv_format=format,
        index_format=format,
        **limits,
    )
    return next(s for s in shape.sites() if s.kind == kind)


def peers(folder: str) -> SimpleNamespace:
    """vLLM's Triton kernels from a folder that holds its files (see README.md); none of it is imported otherwise."""
    sys.path.insert(0, f"{folder}/peers")
    from vllm.models.minimax_m3.common.ops import index_topk, sparse_attn

    return SimpleNamespace(folder=folder, index=index_topk, sparse=sparse_attn, split_score=_ungated(index_topk))


def load_cuda_ops(folder: str) -> None:
    """vLLM's compiled operators (its stable-ABI library, reduced to this architecture's code)."""
    path = "/tmp/_C_stable_libtorch.abi3.so"
    if not os.path.exists(path):
        packed = f"{folder}/thin__C_stable_libtorch.abi3.so.xz"
        subprocess.check_call(f"xz -dc {packed} > {path}.{os.getpid()} && mv {path}.{os.getpid()} {path}", shell=True)
    torch.ops.load_library(path)


def _ungated(module: object) -> Callable[[int], Callable[..., torch.Tensor]]:
    """The peer's prefill score with its own split-K switched on: its best legal form."""
    text = inspect.getsource(module.minimax_m3_index_score).replace("@torch.no_grad()", "")
    text = re.sub(r"    if not \(\n.*?\n    \):\n        split_k = 1\n", "", text, flags=re.S)

    def at(target: int) -> Callable[..., torch.Tensor]:
        names = dict(module.__dict__)
        exec(text.replace("SCORE_TARGET_GRID = 48", f"SCORE_TARGET_GRID = {target}"), names)
        return names["minimax_m3_index_score"]

    return at


def cache(pages: int, heads: int, has_values: bool, format: str = "bfloat16") -> PagedCache:
    """Random contents in hnd, or msa_slot for nvfp4; with global scales of 1 where the format has them."""
    layout = KVLayout(page_map(format, "hnd"), format, 128, heads, 128, has_values)
    made = layout.empty(pages, DEVICE)
    scales = [torch.ones((), device=DEVICE) for _ in range(2 if has_values and format != "bfloat16" else 0)]
    if format == "bfloat16":
        made.buf.normal_()
    elif format == "fp8_e4m3":
        for part in made.buf.split(1024):
            part.copy_(torch.randn(part.shape, device=DEVICE).to(torch.float8_e4m3fn).view(torch.uint8))
    else:
        made.buf.random_(0, 256)
        for name in ("k", "v")[: layout.parts]:  # E4M3 scales from 1/8 to 15/32: numbers about as large as the others'
            where = stored(made, name).scales
            for part in where.split(1024):
                part.copy_(torch.randint(0x20, 0x30, part.shape, device=DEVICE, dtype=torch.uint8))
    return PagedCache(made.buf, layout, *scales)


def read_pages(cache: PagedCache, part: str, pages: torch.Tensor) -> torch.Tensor:
    """fp64 [heads, len(pages) * 128, dim] of whole pages."""
    vectors = stored(cache, part).take_pages(pages)
    if cache.layout.format == "bfloat16":
        return vectors.data.double()
    return dequantize(vectors, torch.float32).double()


def metas(pages: int, requests: int, q_len: int, seq_len: int, count: int, seed: int = 0) -> list[SeqMeta]:
    """``count`` batches of equal requests over distinct random pages."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-seq_len // 128)
    cu_q = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE) * q_len
    lens = torch.full((requests,), seq_len, dtype=torch.int32, device=DEVICE)
    made = []
    for _ in range(count):
        if requests * blocks <= pages:
            table = torch.randperm(pages, generator=generator)[: requests * blocks]
        else:
            table = torch.randint(0, pages, (requests * blocks,), generator=generator)
        made.append(SeqMeta(cu_q, lens, table.view(requests, blocks).int().to(DEVICE), q_len, seq_len))
    return made


def random_ids(positions: torch.Tensor, groups: int, k: int = 16, seed: int = 0) -> torch.Tensor:
    """int32 [T, groups, k]: the own block and random earlier ones, ascending, -1 in the tail."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    newest = positions // 128
    blocks = int(newest.max()) + 1
    ids = torch.empty(len(positions), groups, k, dtype=torch.int32, device=DEVICE)
    for low in range(0, len(positions), 1024):
        own = newest[low : low + 1024]
        score = torch.rand(len(own), groups, blocks, generator=generator, device=DEVICE)
        score.masked_fill_(torch.arange(blocks, device=DEVICE) > own[:, None, None], -1.0)
        score.scatter_(2, own[:, None, None].expand(-1, groups, 1), 2.0)
        value, chosen = score.topk(min(k, blocks), -1)
        chosen = torch.where(value < 0, 2**30, chosen).sort(-1).values
        chosen = torch.nn.functional.pad(chosen, (0, k - chosen.shape[-1]), value=2**30)
        ids[low : low + 1024] = torch.where(chosen == 2**30, -1, chosen).int()
    return ids


def relative(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Worst relative L2 error of a row."""
    error = (actual.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1).clamp_min(1e-30)
    return float(error.nan_to_num(float("inf")).max())


def graphs(candidates: dict[str, Sequence[Callable[[], object]]], calls: int = 32) -> dict[str, float]:
    """Median microseconds a call by graph replay; each candidate is a list of calls over rotating inputs."""
    made = {}
    for name, functions in candidates.items():
        for function in functions[:2]:
            function()
        torch.cuda.synchronize()
        if WARM:
            continue
        chain = (list(functions) * (calls // len(functions) + 1))[: max(calls, len(functions))]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for function in chain:
                function()
        graph.replay()
        made[name] = (graph, len(chain))
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(ROUNDS):
        for name, (graph, length) in made.items():
            times[name].append(_event(graph.replay, 3) / 3 / length)
    return {name: statistics.median(found) for name, found in times.items()}


def events(candidates: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of GPU time of single calls, each behind a flush of the cache.

    The GPU is kept busy until the host has launched the whole call: what the host takes is a row of its own.
    """
    flush = torch.empty(64 << 20, dtype=torch.int32, device=DEVICE)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for function in candidates.values():
        function()
    torch.cuda.synchronize()
    for _ in range(0 if WARM else ROUNDS):
        for name, function in candidates.items():
            flush.zero_()
            torch.cuda._sleep(4_000_000)  # clock cycles, about 2 ms
            times[name].append(_event(function, 1))
    return {name: statistics.median(found) for name, found in times.items() if found}


def host(candidates: dict[str, Callable[[], object]], calls: int = 100) -> dict[str, float]:
    """Median microseconds that the host takes to enqueue a call, onto an idle GPU."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for function in candidates.values():
        for _ in range(20):
            function()
    torch.cuda.synchronize()
    for _ in range(0 if WARM else calls):
        for name, function in candidates.items():
            begin = time.perf_counter()
            function()
            times[name].append((time.perf_counter() - begin) * 1e6)
            torch.cuda.synchronize()
    return {name: statistics.median(found) for name, found in times.items() if found}


def launches(function: Callable[[], object]) -> int:
    """Kernels that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def _event(function: Callable[[], object], times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def ceilings() -> dict[str, float]:
    """GB/s of a large copy (read + write), TFLOP/s of a bf16 matrix product on random data."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    copy = statistics.median(_event(lambda: target.copy_(source), 5) / 5 for _ in range(5))
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = statistics.median(_event(lambda: a @ b, 5) / 5 for _ in range(5))
    return {"copy_GBps": 2 * (1 << 30) / copy / 1e3, "bf16_TFLOPs": 2 * 8192**3 / product / 1e6}


def row(operator: str, case: str, times: dict[str, float], ours: str = "m3hal", **facts: object) -> None:
    """Keeps and prints one row; ratio = best peer / ours."""
    rivals = {name: t for name, t in times.items() if not name.startswith(ours)}
    best = min((t for name, t in times.items() if name.startswith(ours)), default=float("nan"))
    ratio = min(rivals.values()) / best if rivals and times else None
    ROWS.append({"operator": operator, "case": case, "us": times, "ratio": ratio, **facts})
    shown = "  ".join(f"{name} {t:.1f}" for name, t in times.items())
    extra = "  ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items()
    )
    against = "no peer    " if ratio is None else f"ratio {ratio:5.2f}"
    print(f"{operator:24s} {case:28s} {against} | {shown} | {extra}", flush=True)


def save(path: Path, command: str) -> None:
    """All rows, the machine, and the command that made them, as ``m3hal bench --read`` takes them."""
    properties = torch.cuda.get_device_properties(0)
    machine = {"device": "cuda:sm_90", "backend": "triton", "device_label": properties.name}
    machine |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    path.write_text(to_json([measured(kept) for kept in ROWS], machine, {}, command))


def measured(kept: dict) -> Measured:
    """A row of :func:`row` as the table has it."""
    us, floor = kept["us"], kept.get("floor_us")
    ours, errors = us.get("m3hal"), {k: v for k, v in kept.items() if k.startswith("error")}
    rivals = {name: t for name, t in us.items() if not name.startswith("m3hal")}
    best = min(rivals, key=rivals.get, default="")
    known = {"operator", "case", "us", "ratio", "floor_us", "runs", *errors}
    return Measured(
        kept["operator"],
        kept["case"],
        "measured",
        us=us,
        runs=kept.get("runs", ROUNDS),
        floor_us=floor,
        share=floor / ours if floor and ours else None,
        ratio=kept["ratio"],
        best=best,
        errors={name.removeprefix("error_"): value for name, value in errors.items()},
        facts={name: value for name, value in kept.items() if name not in known},
    )
