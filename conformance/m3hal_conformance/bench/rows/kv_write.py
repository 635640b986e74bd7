"""Cache writes by themselves, where no fused insertion is; nobody else's is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from m3hal_conformance.bench import Bench, Floor, Row, Work
from m3hal_conformance.bench.rows import FORMATS, RANKS
from m3hal_conformance.bench.rows.qk_norm_rope_insert import empty, pages_of

ABSENT = "vllm writes these caches in its fused insertion (qk_norm_rope_insert), which is timed there"


def rows(small: bool) -> Iterator[Row]:
    for ranks in RANKS:
        for format, short in FORMATS.items():
            tokens = 5 if small else 8192
            yield Row("kv_write", f"{short} TP{ranks} {tokens}", partial(_write, format, ranks, tokens))


def _write(format: str, ranks: int, tokens: int, bench: Bench) -> Work:
    site = replace(bench.site(tensor_parallel=ranks), kv_format=format)
    heads = site.num_kv_heads
    pairs = [[bench.normal(tokens, heads, 128) for _ in range(2)] for _ in range(2 if bench.small else 8)]
    slots = torch.randperm(pages_of(bench) * 128, device=bench.device)[:tokens]
    cache, wanted = empty(bench, format, heads, True), empty(bench, format, heads, True)
    calls = bench.calls("kv_write", site, [(cache, *pair, slots) for pair in pairs], None)

    def check() -> float:
        """After the first pair, which the first call wrote."""
        bench.exact("kv_write", site, wanted, *pairs[0], slots)
        return float((cache.buf.view(torch.uint8) != wanted.buf.view(torch.uint8)).float().mean())

    size = 4 * tokens * heads * 128
    floor = Floor(read=size, written=tokens * cache.layout.bytes_per_token())
    return Work({"m3hal": calls}, floor, {"m3hal": check}, limit=0.0, absent=ABSENT)
