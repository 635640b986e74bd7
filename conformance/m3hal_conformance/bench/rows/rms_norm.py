"""Gemma RMSNorm of the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from m3hal_conformance.bench import Bench, Floor, Row, Work
from m3hal_conformance.bench.bench import relative

TOKENS = (1, 8, 64, 512, 8192)


def rows(small: bool) -> Iterator[Row]:
    for tokens in (5,) if small else TOKENS:
        yield Row("rms_norm", f"{tokens}", partial(_norm, tokens))


def _norm(tokens: int, bench: Bench) -> Work:
    site = bench.site("moe")
    xs = [bench.normal(tokens, site.hidden_size) for _ in range(bench.rotations(2 * tokens * site.hidden_size))]
    weight, out = bench.normal(site.hidden_size) * 0.1, bench.poison(*xs[0].shape)
    calls = dict(bench.peer.norms(site, xs, weight)) if bench.peer else {}
    calls["m3hal"] = bench.calls("rms_norm", site, [(x, weight) for x in xs], out)
    check = lambda: relative(out, bench.exact("rms_norm", site, xs[0].double(), weight.double()))  # noqa: E731
    size = 2 * tokens * site.hidden_size
    return Work(calls, Floor(read=size, written=size), {"m3hal": check})
