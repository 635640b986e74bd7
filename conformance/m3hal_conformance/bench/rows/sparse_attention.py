"""Attention over 16 chosen blocks: one token a request, four with equal choices, and chunks of a prefill."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from m3hal.layouts import PagedCache
from m3hal.ops import SeqMeta
from m3hal.shape import Site
from m3hal_conformance.bench import Bench, Calls, Floor, Row, Work
from m3hal_conformance.bench.bench import alone, relative, sample
from m3hal_conformance.bench.rows import FORMATS, KEY_BYTES, RANKS, kilo

#: (requests, tokens of each)
DECODE = ((1, 1), (8, 1), (64, 1), (1, 4), (8, 4), (64, 4))
#: (ranks, tokens, context, format)
PREFILL = (
    *((ranks, tokens, context, "bfloat16") for ranks in RANKS for tokens, context in ((2048, 65536), (8192, 65536))),
    *((ranks, 8192, 65536, format) for ranks in RANKS for format in ("fp8_e4m3", "nvfp4")),
    (1, 2048, 65536, "fp8_e4m3"),
)


def rows(small: bool) -> Iterator[Row]:
    for ranks in RANKS:
        for format, short in FORMATS.items():
            for requests, each in ((2, 1), (1, 4)) if small else DECODE:
                name = "verify" if each > 1 else "decode"
                yield Row(
                    "sparse_attention", f"{name} {short} TP{ranks} B{requests} x{each}",
                    partial(_decode, format, ranks, requests, each),
                )  # fmt: skip
    for ranks, tokens, context, format in ((4, 40, 2560, "bfloat16"),) if small else PREFILL:
        case = f"prefill {FORMATS[format]} TP{ranks} {tokens} @ {kilo(context)}"
        yield Row("sparse_attention", case, partial(_prefill, format, ranks, tokens, context, False))
        if tokens == 8192 and format != "nvfp4":
            yield Row(
                "sparse_attention", f"{case} overlapping", partial(_prefill, format, ranks, tokens, context, True)
            )


def _decode(format: str, ranks: int, requests: int, each: int, bench: Bench) -> Work:
    site = bench.site(tensor_parallel=ranks, format=format)
    context, pages = (2560, 40) if bench.small else (65536, 16384)
    groups, k = site.num_kv_heads, site.top_k_blocks
    size = requests * groups * k * site.block_size * 2 * KEY_BYTES[format]
    metas = bench.batches(pages, requests, each, context, bench.rotations(size))
    positions = torch.full((requests,), context - each, device=bench.device)
    ids = [bench.random_ids(positions, groups, k).repeat_interleave(each, 0) for _ in metas]
    queries = [bench.normal(requests * each, site.num_q_heads, site.head_dim) for _ in metas]
    ours, theirs = (bench.poison(*queries[0].shape) for _ in range(2))
    kv, rival = bench.cache(format, pages, groups, True), "fp8_e4m3" if format == "nvfp4" else format
    against = bench.cache(rival, pages, groups, True)
    calls: Calls = {}
    checks = {"m3hal": partial(off, bench, site, ours, queries[0], kv, ids[0], metas[0])}
    if bench.peer:
        name = "vllm" if rival == format else "vllm fp8"
        calls[name] = bench.peer.sparse_decode(site, queries, against, ids, metas, theirs)
        checks[name] = partial(off, bench, site, theirs, queries[0], against, ids[0], metas[0])
    if rival != format:
        fp8 = bench.site(tensor_parallel=ranks, format=rival)
        inputs = [(q, against, i, m) for q, i, m in zip(queries, ids, metas, strict=True)]
        calls |= bench.rival("our fp8", "sparse_attention", fp8, inputs, torch.empty_like(ours))
    inputs = [(q, kv, i, m) for q, i, m in zip(queries, ids, metas, strict=True)]
    calls["m3hal"] = bench.calls("sparse_attention", site, inputs, ours)
    return Work(calls, Floor(read=size), checks)


def _prefill(format: str, ranks: int, tokens: int, context: int, overlap: bool, bench: Bench) -> Work:
    """overlap: 128 neighbours choose the same blocks. Planning the batch counts, though layers share it."""
    site = bench.site(tensor_parallel=ranks, format=format)
    groups, pages = site.num_kv_heads, 40 if bench.small else 1024
    (meta,) = bench.batches(pages, 1, tokens, context)
    positions = torch.arange(context - tokens, context, device=bench.device)
    ids = bench.random_ids(positions, groups, site.top_k_blocks)
    if overlap:
        ids = ids[::128].repeat_interleave(128, 0)[:tokens]
    q, kv = bench.normal(tokens, site.num_q_heads, site.head_dim), bench.cache(format, pages, groups, True)
    ours, theirs = (bench.poison(*q.shape) for _ in range(2))
    calls: Calls = {}
    checks = {"m3hal": partial(off, bench, site, ours, q, kv, ids, meta)}
    if bench.peer and format != "nvfp4":
        before = torch.tensor([context - tokens], dtype=torch.int32, device=bench.device)
        calls["vllm"] = [bench.peer.sparse_prefill(site, q, kv, ids, meta, before, theirs)]
        checks["vllm"] = partial(off, bench, site, theirs, q, kv, ids, meta)
    calls["m3hal"] = bench.calls("sparse_attention", site, [(q, kv, ids, meta)], ours, replans=True)
    seen = int(((ids >= 0).sum((1, 2)) * 128 - (127 - positions % 128) * groups).sum())
    floor = Floor(flops=4 * site.head_dim * seen * site.num_q_heads / groups)
    absent = "vllm has no NVFP4 cache on this device" if format == "nvfp4" else ""
    return Work(calls, floor, checks, timing="single", absent=absent)


def off(
    bench: Bench,
    site: Site,
    out: torch.Tensor,
    q: torch.Tensor,
    kv: PagedCache,
    ids: torch.Tensor,
    meta: SeqMeta,
) -> float:
    """Worst relative error of a row, over sampled tokens."""
    tokens = sample(len(out))
    exact = bench.exact("sparse_attention", site, q[tokens].double(), kv, ids[tokens], alone(meta, tokens))
    return relative(out[tokens], exact)
