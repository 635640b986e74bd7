"""The choice from scores: 4 heads x 8192 tokens x 512 blocks is a prefill chunk at the end of 64K."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from m3hal_conformance.bench import Bench, Calls, Floor, Row, Work
from m3hal_conformance.bench.rows import RANKS, kilo
from m3hal_conformance.bench.rows.select_blocks import PREFILL


def rows(small: bool) -> Iterator[Row]:
    for ranks in RANKS:
        for tokens, context in ((40, 2560),) if small else PREFILL:
            yield Row(
                "topk_blocks", f"prefill TP{ranks} {tokens} @ {kilo(context)}",
                partial(_prefill, ranks, tokens, context),
            )  # fmt: skip


def _prefill(ranks: int, tokens: int, context: int, bench: Bench) -> Work:
    site = bench.site(tensor_parallel=ranks)
    heads, blocks = site.num_index_heads, -(-context // site.block_size)
    (meta,) = bench.batches(blocks, 1, tokens, context)
    visible = (meta.positions(tokens) // site.block_size + 1).int()
    scores = bench.normal(tokens, heads, blocks, dtype=torch.float32)
    scores.masked_fill_(torch.arange(blocks, device=bench.device) >= visible[:, None, None], float("-inf"))
    ours, theirs = (bench.poison(tokens, heads, site.top_k_blocks, dtype=torch.int32) for _ in range(2))
    calls: Calls = {}
    if bench.peer:
        before = torch.tensor([context - tokens], dtype=torch.int32, device=bench.device)
        calls["vllm"] = [bench.peer.topk(site, scores.transpose(0, 1).contiguous(), meta, before, theirs)]
    calls["m3hal"] = bench.calls("topk_blocks", site, [(scores, visible)], ours)
    check = lambda: float((ours != bench.exact("topk_blocks", site, scores, visible)).float().mean())  # noqa: E731
    floor = Floor(read=scores.numel() * 4, written=ours.numel() * 4)
    return Work(calls, floor, {"m3hal": check}, limit=0.0, timing="single")
