"""Index scores of a prefill, as their own operator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from m3hal_conformance.bench import Bench, Calls, Floor, Row, Work
from m3hal_conformance.bench.bench import alone, sample
from m3hal_conformance.bench.rows import RANKS, kilo
from m3hal_conformance.bench.rows.select_blocks import PREFILL


def rows(small: bool) -> Iterator[Row]:
    for ranks in RANKS:
        for tokens, context in ((40, 2560),) if small else PREFILL:
            yield Row(
                "block_scores", f"prefill bf16 TP{ranks} {tokens} @ {kilo(context)}",
                partial(_prefill, ranks, tokens, context),
            )  # fmt: skip


def _prefill(ranks: int, tokens: int, context: int, bench: Bench) -> Work:
    site = bench.site(tensor_parallel=ranks)
    pages, heads = 40 if bench.small else 1024, site.num_index_heads
    (meta,) = bench.batches(pages, 1, tokens, context)
    index_q, cache = bench.normal(tokens, heads, site.index_dim), bench.cache("bfloat16", pages, 1, False)
    ours = bench.poison(tokens, heads, -(-context // site.block_size), dtype=torch.float32)
    calls: Calls = {}
    if bench.peer:
        before = torch.tensor([context - tokens], dtype=torch.int32, device=bench.device)
        calls = {name: [call] for name, call in bench.peer.scores(site, index_q, cache, meta, before).items()}
    calls["m3hal"] = bench.calls("block_scores", site, [(index_q, cache, meta)], ours)
    chosen = sample(tokens)

    def off() -> float:
        exact = bench.exact("block_scores", site, index_q[chosen].double(), cache, alone(meta, chosen))
        found, finite = ours[chosen][..., : exact.shape[-1]].double(), exact.isfinite()
        if not torch.equal(found.isfinite(), finite):
            return float("inf")
        return float(((found - exact)[finite].abs().max() / exact[finite].abs().max()).nan_to_num(float("inf")))

    keys = (2 * context - tokens + 1) / 2
    floor = Floor(read=context * 256, written=ours.numel() * 4, flops=2 * heads * site.index_dim * tokens * keys)
    return Work(calls, floor, {"m3hal": off}, limit=1e-3, timing="single")
