"""``m3hal bench``: what a plan serves on a device, timed beside its floor and a peer, and checked in the same run.

A row is a call at MiniMax-M3's shapes. :mod:`m3hal_conformance.bench.rows` holds one module for each operator; a module
there whose ``rows(small)`` yields :class:`Row` is part of the table, and nothing else need be told about it::

    def rows(small: bool) -> Iterator[Row]:
        for tokens in (8,) if small else (1, 64, 8192):
            yield Row("rms_norm", f"{tokens}", partial(_norm, tokens))

    def _norm(tokens: int, bench: Bench) -> Work:
        site = bench.site("moe")
        xs = [bench.normal(tokens, site.hidden_size) for _ in range(bench.rotations(2 * tokens * site.hidden_size))]
        weight, out = bench.normal(site.hidden_size), bench.poison(tokens, site.hidden_size)
        calls = {"m3hal": bench.calls("rms_norm", site, [(x, weight) for x in xs], out)}
        if bench.peer:
            calls["vllm"] = bench.peer.rms_norm(...)
        exact = bench.exact("rms_norm", site, xs[0], weight)
        return Work(calls, Floor(read=..., written=...), checks={"m3hal": lambda: relative(out, exact)})
"""

from __future__ import annotations

from m3hal_conformance.bench.bench import Bench
from m3hal_conformance.bench.vllm_peer import Peer
from m3hal_conformance.bench.work import Call, Calls, Floor, Row, Work, Wrong

__all__ = ["Bench", "Call", "Calls", "Floor", "Peer", "Row", "Work", "Wrong"]
