"""Calls of ``linear``, ``route_topk``, ``quantize`` and ``dequantize`` for machine_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from m3hal.formats import FORMATS, PLAIN_FORMATS, QTensor, spec_of
from m3hal.ops import load
from m3hal.shape import Site

STORED = ("fp8_e4m3", "fp8_e4m3_240", "mxfp8", "mxfp4", "nvfp4")


def weight(format: str, rows: int, width: int) -> torch.Tensor | QTensor:
    """A weight in a format, of no particular numbers."""
    if format in PLAIN_FORMATS:
        return torch.empty(rows, width, dtype=getattr(torch, format))
    q = load("quantize").fake(torch.empty(rows, width), activation_format=format)
    return replace(q, global_scale=torch.ones(())) if format == "nvfp4" else q


def _linear(site: Site, tokens: int, format: str, dtype: str = "bfloat16", rows: int = 2560) -> None:
    from m3hal_triton.linear import linear

    linear(site)(torch.empty(tokens, 6144, dtype=getattr(torch, dtype)), weight(format, rows, 6144))


def _linear_fp8(site: Site, tokens: int) -> None:
    from m3hal_triton.linear import linear_fp8

    linear_fp8(site)(torch.empty(tokens, 6144, dtype=torch.bfloat16), weight("fp8_e4m3", 2560, 6144))


def _gate(site: Site, tokens: int) -> None:
    """As the router asks: bf16 tokens, an fp32 weight, an fp32 output."""
    from m3hal_triton.linear import linear

    out = torch.empty(tokens, 128)
    linear(site)(torch.empty(tokens, 6144, dtype=torch.bfloat16), weight("float32", 128, 6144), out=out)


def _route(site: Site, forced: bool) -> None:
    from m3hal_triton.route_topk import route_topk

    ids = torch.zeros(64, 4, dtype=torch.int32) if forced else None
    route_topk(site)(torch.empty(64, 128), torch.empty(128), ids)


def _convert(site: Site, format: str) -> None:
    from m3hal_triton.dequantize import dequantize
    from m3hal_triton.quantize import quantize

    x = torch.empty(64, 6144, dtype=torch.bfloat16)
    q = quantize(replace(site, activation_format=format))(x)
    assert q.spec == spec_of(format)
    dequantize(site)(q)


def cases(site: Callable[[], Site]) -> dict[str, Callable[[], None]]:
    """By name; site: makes the one of the experts."""

    def at(call: Callable[..., None], *given: object) -> Callable[[], None]:
        return lambda: call(site(), *given)

    found = {
        "route": at(_route, False),
        "route forced": at(_route, True),
        "linear fp8 by fp8 8192": at(_linear_fp8, 8192),
        "linear fp8 by fp8 1": at(_linear_fp8, 1),
        "linear fp32": at(partial(_linear, dtype="float32"), 512, "float32"),
        **{f"gate {tokens}": at(_gate, tokens) for tokens in (1, 8, 16, 64, 8192)},
        **{f"convert {format}": at(_convert, format) for format in FORMATS if format != "float64"},
    }
    for format in ("bfloat16", *STORED):
        found |= {f"linear {format} {tokens}": at(_linear, tokens, format) for tokens in (1, 64, 8192)}
    return found
