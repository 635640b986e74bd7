"""Conversion of activations, beside vLLM's for FP8 by tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from m3hal.formats import QTensor
from m3hal_conformance.bench import Bench, Calls, Floor, Row, Work
from m3hal_conformance.bench.bench import nbytes

FORMATS = ("fp8_e4m3", "mxfp8", "mxfp4", "nvfp4")


def rows(small: bool) -> Iterator[Row]:
    for format in FORMATS:
        for tokens in (3,) if small else (1, 64, 8192):
            yield Row("quantize", f"{format} {tokens}", partial(_convert, format, tokens))


def _convert(format: str, tokens: int, bench: Bench) -> Work:
    site = replace(bench.site("moe"), activation_format=format)
    xs = [bench.normal(tokens, site.hidden_size) for _ in range(bench.rotations(3 * tokens * site.hidden_size))]
    out: QTensor = bench.exact("quantize", site, xs[0][:1].expand(tokens, -1).contiguous())
    calls: Calls = {"m3hal": bench.calls("quantize", site, [(x,) for x in xs], out)}
    step = bench.peer.compiled("dynamic_per_token_scaled_fp8_quant") if bench.peer else None
    if step and format == "fp8_e4m3":
        data, scale = torch.empty_like(out.data).view(torch.float8_e4m3fn), torch.empty_like(out.scale)  # type: ignore[arg-type]
        calls["vllm cuda"] = [partial(step, data, x, scale, None) for x in xs]

    def off() -> float:
        """The share of bytes that differ."""
        exact = bench.exact("quantize", site, xs[0])
        return float((out.data.view(torch.uint8) != exact.data.view(torch.uint8)).float().mean())

    absent = ""
    if len(calls) == 1:
        only = f"of vllm only the conversion to FP8 is timed, not to {format}"
        absent = "vllm's compiled operators are not loaded" if format == "fp8_e4m3" else only
    return Work(calls, Floor(read=nbytes(xs[0]), written=nbytes(out)), {"m3hal": off}, limit=0.0, absent=absent)
