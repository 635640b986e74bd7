"""The sum with the residual, and its Gemma RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from m3hal_conformance.bench import Bench, Floor, Row, Work
from m3hal_conformance.bench.bench import relative
from m3hal_conformance.bench.rows.rms_norm import TOKENS


def rows(small: bool) -> Iterator[Row]:
    for tokens in (5,) if small else TOKENS:
        yield Row("add_rms_norm", f"{tokens}", partial(_norm, tokens))


def _norm(tokens: int, bench: Bench) -> Work:
    site = bench.site("moe")
    size = 2 * tokens * site.hidden_size
    pairs = [(bench.normal(tokens, site.hidden_size), bench.normal(tokens, site.hidden_size)) for _ in range(
        bench.rotations(2 * size))]  # fmt: skip
    weight = bench.normal(site.hidden_size) * 0.1
    out = bench.poison(*pairs[0][0].shape), bench.poison(*pairs[0][0].shape)
    calls = dict(bench.peer.add_norms(site, pairs, weight)) if bench.peer else {}
    calls["m3hal"] = bench.calls("add_rms_norm", site, [(*pair, weight) for pair in pairs], out)

    def off() -> float:
        exact = bench.exact("add_rms_norm", site, *(part.double() for part in (*pairs[0], weight)))
        return max(relative(o, e) for o, e in zip(out, exact, strict=True))

    return Work(calls, Floor(read=2 * size, written=2 * size), {"m3hal": off})
