"""Conversion of stored activations back to bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from m3hal_conformance.bench import Bench, Floor, Row, Work
from m3hal_conformance.bench.bench import nbytes
from m3hal_conformance.bench.rows.quantize import FORMATS


def rows(small: bool) -> Iterator[Row]:
    for format in FORMATS:
        for tokens in (3,) if small else (1, 64, 8192):
            yield Row("dequantize", f"{format} {tokens}", partial(_convert, format, tokens))


def _convert(format: str, tokens: int, bench: Bench) -> Work:
    site = replace(bench.site("moe"), activation_format=format)
    count = min(8, bench.rotations(3 * tokens * site.hidden_size))
    stored = [bench.exact("quantize", site, bench.normal(tokens, site.hidden_size)) for _ in range(count)]
    out = bench.poison(tokens, site.hidden_size)
    calls = bench.calls("dequantize", site, [(q,) for q in stored], out)
    check = lambda: float((out != bench.exact("dequantize", site, stored[0])).float().mean())  # noqa: E731
    floor, absent = Floor(read=nbytes(stored[0]), written=nbytes(out)), "vllm converts inside the products that take it"
    return Work({"m3hal": calls}, floor, {"m3hal": check}, limit=0.0, absent=absent)
