"""SwiGLU-OAI by itself; moe_experts has it in its products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from m3hal_conformance.bench import Bench, Floor, Row, Work
from m3hal_conformance.bench.bench import relative
from m3hal_conformance.bench.rows import RANKS


def rows(small: bool) -> Iterator[Row]:
    for ranks in RANKS:
        for tokens in (5,) if small else (4, 32, 256, 2048, 32768):
            yield Row("swiglu_oai", f"TP{ranks} {tokens}", partial(_activation, ranks, tokens))


def _activation(ranks: int, tokens: int, bench: Bench) -> Work:
    site = bench.site("moe", ranks)
    inner = site.intermediate_size
    xs = [bench.normal(tokens, 2 * inner) * 3 for _ in range(bench.rotations(4 * tokens * inner))]
    out = bench.poison(tokens, inner)
    calls = dict(bench.peer.activation(site, xs)) if bench.peer else {}
    calls["m3hal"] = bench.calls("swiglu_oai", site, [(x,) for x in xs], out)
    check = lambda: relative(out, bench.exact("swiglu_oai", site, xs[0].double()))  # noqa: E731
    return Work(calls, Floor(read=4 * tokens * inner, written=2 * tokens * inner), {"m3hal": check})
