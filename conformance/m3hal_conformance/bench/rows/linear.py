"""A projection's product with weights in each format: one of four ranks' q, k, v and indexer; beside cuBLAS in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from m3hal.formats import dequantize
from m3hal_conformance.bench import Bench, Calls, Floor, Row, Work
from m3hal_conformance.bench.bench import nbytes, relative
from m3hal_conformance.bench.rows.moe_experts import FORMATS, random_matrix

#: rows of the weight
WIDTH = 2560


def rows(small: bool) -> Iterator[Row]:
    for format, short in FORMATS.items():
        for tokens in (3,) if small else (1, 64, 8192):
            yield Row("linear", f"{short} {tokens}", partial(_product, format, tokens))


def _product(format: str, tokens: int, bench: Bench) -> Work:
    site = replace(bench.site("moe"), weight_format=format)
    hidden, width = site.hidden_size, 64 if bench.small else WIDTH
    several = random_matrix(bench, format, 2 if bench.small else 12, width, hidden)
    weights = [several[number] for number in range(2 if bench.small else 12)]
    plain = [w if isinstance(w, torch.Tensor) else dequantize(w, torch.bfloat16) for w in weights[:6]]
    x, out = bench.normal(tokens, hidden), bench.poison(tokens, width)
    other = torch.empty_like(out)
    name = ("cuBLAS" if x.is_cuda else "torch") + ("" if format == "bfloat16" else " bf16")
    calls: Calls = {name: [partial(torch.matmul, x, w.T, out=other) for w in plain]}
    calls["m3hal"] = bench.calls("linear", site, [(x, w) for w in weights], out)
    few = slice(0, 256)

    def off() -> float:
        weight = weights[0] if format != "bfloat16" else weights[0].double()  # type: ignore[union-attr]
        return relative(out[few], bench.exact("linear", site, x[few].double(), weight))

    floor = Floor(read=nbytes(weights[0]) + 2 * tokens * hidden, written=2 * tokens * width)
    return Work(calls, replace(floor, flops=2.0 * tokens * width * hidden), {"m3hal": off})
