"""Scores and choice. An NVFP4 index cache has no peer of its own format: it stands beside both fp8 ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from m3hal.layouts import PagedCache
from m3hal.ops import SeqMeta
from m3hal.shape import Site
from m3hal_conformance.bench import Bench, Call, Calls, Floor, Row, Work, Wrong
from m3hal_conformance.bench.bench import alone, sample
from m3hal_conformance.bench.rows import FORMATS, KEY_BYTES, RANKS, kilo

#: (requests, context) of one token a request
DECODE = ((1, 8192), (1, 65536), (8, 65536), (64, 8192), (64, 65536), (1, 524288), (8, 524288))
#: (tokens, context) of one request
PREFILL = ((2048, 8192), (2048, 65536), (8192, 8192), (8192, 65536))


def rows(small: bool) -> Iterator[Row]:
    for format, short in FORMATS.items():
        for ranks in RANKS:
            for requests, context in ((1, 640), (3, 2560)) if small else DECODE:
                case = f"decode {short} TP{ranks} B{requests} {kilo(context)}"
                yield Row("select_blocks", case, partial(_decode, format, ranks, requests, context))
    for format in ("bfloat16", "fp8_e4m3"):
        for ranks in RANKS:
            for tokens, context in ((40, 2560),) if small else PREFILL:
                case = f"prefill {FORMATS[format]} TP{ranks} {tokens} @ {kilo(context)}"
                yield Row("select_blocks", case, partial(_prefill, format, ranks, tokens, context))


def _decode(format: str, ranks: int, requests: int, context: int, bench: Bench) -> Work:
    site = bench.site(tensor_parallel=ranks, format=format)
    size = requests * context * KEY_BYTES[format]
    pages, heads = 40 if bench.small else 32768, site.num_index_heads
    metas = bench.batches(pages, requests, 1, context, bench.rotations(size))
    queries = [bench.normal(requests, heads, site.index_dim) for _ in metas]
    ours, theirs = (bench.poison(requests, heads, site.top_k_blocks, dtype=torch.int32) for _ in range(2))
    cache = bench.cache(format, pages, 1, False)
    rival = "fp8_e4m3" if format == "nvfp4" else format
    against = bench.cache(rival, pages, 1, False)
    calls: Calls = {}
    if bench.peer:
        name = "vllm" if format == "bfloat16" else "vllm fp8 queries" if rival == format else "vllm fp8"
        calls[name] = bench.peer.index_decode(site, queries, against, metas, theirs)
    if rival != format:
        fp8 = bench.site(tensor_parallel=ranks, format=rival)
        inputs = [(q, against, meta) for q, meta in zip(queries, metas, strict=True)]
        calls |= bench.rival("our fp8", "select_blocks", fp8, inputs, torch.empty_like(ours))
    inputs = [(q, cache, meta) for q, meta in zip(queries, metas, strict=True)]
    calls["m3hal"] = bench.calls("select_blocks", site, inputs, ours)
    checks = {"m3hal": partial(missed, bench, site, ours, queries[0], cache, metas[0])}
    return Work(calls, Floor(read=size), checks, limit=0.05)


def _prefill(format: str, ranks: int, tokens: int, context: int, bench: Bench) -> Work:
    site = bench.site(tensor_parallel=ranks, format=format)
    pages, heads = max(1024, context // 128) if not bench.small else 40, site.num_index_heads
    (meta,) = bench.batches(pages, 1, tokens, context)
    index_q, cache = bench.normal(tokens, heads, site.index_dim), bench.cache(format, pages, 1, False)
    ours, theirs = (bench.poison(tokens, heads, site.top_k_blocks, dtype=torch.int32) for _ in range(2))
    calls: Calls = {}
    if bench.peer:
        before = torch.tensor([context - tokens], dtype=torch.int32, device=bench.device)
        queries = index_q.to(torch.float8_e4m3fn) if format == "fp8_e4m3" else index_q  # as its fp8 products take them
        choose = partial(bench.peer.topk, site, meta=meta, before=before, out=theirs)
        for name, score in bench.peer.scores(site, queries, cache, meta, before).items():
            calls[name if format == "bfloat16" else f"{name} fp8 queries"] = [partial(chained, score, choose)]
    calls["m3hal"] = bench.calls("select_blocks", site, [(index_q, cache, meta)], ours)
    keys = (2 * context - tokens + 1) / 2
    floor = Floor(read=context * KEY_BYTES[format], flops=2 * heads * site.index_dim * tokens * keys)
    checks = {"m3hal": partial(missed, bench, site, ours, index_q, cache, meta)}
    return Work(calls, floor, checks, limit=0.05, timing="single")


def chained(score: Callable[[], torch.Tensor], choose: Callable[..., Call]) -> None:
    """A peer's two steps, the second of which takes what the first returns."""
    choose(scores=score())()


def missed(
    bench: Bench, site: Site, ids: torch.Tensor, index_q: torch.Tensor, cache: PagedCache, meta: SeqMeta
) -> float:
    """The share of the exact choice that was not chosen, over sampled tokens; a rounded score may swap two blocks."""
    tokens = sample(ids.shape[0])
    exact = bench.exact("select_blocks", site, index_q[tokens].double(), cache, alone(meta, tokens))
    hits = total = 0
    for row, best in zip(ids[tokens].flatten(0, 1).tolist(), exact.flatten(0, 1).tolist(), strict=True):
        chosen = [block for block in row if block >= 0]
        wanted = {block for block in best if block >= 0}
        if chosen != sorted(set(chosen)) or row[len(chosen) :] != [-1] * (len(row) - len(chosen)):
            raise Wrong(f"ids must ascend, each once, with -1 in the tail: {row}")
        if max(wanted) not in chosen:
            raise Wrong(f"the newest block, {max(wanted)}, must be chosen: {row}")
        hits, total = hits + len(wanted & set(chosen)), total + len(wanted)
    return 1 - hits / total
