"""The choice of experts from logits, behind the router's fp32 product, and before the order that experts want."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from m3hal_conformance.bench import Bench, Call, Calls, Floor, Row, Work
from m3hal_conformance.bench.rows.moe_experts import random_experts, site_of
from m3hal_conformance.trial import Unsupported

TOKENS = (1, 8, 64, 512, 8192)


def rows(small: bool) -> Iterator[Row]:
    for tokens in (5,) if small else TOKENS:
        yield Row("route_topk", f"{tokens}", partial(_route, False, tokens))
        yield Row("route_topk", f"gate and choice {tokens}", partial(_route, True, tokens), ("linear", "route_topk"))
        if not small:
            needs = ("linear", "route_topk", "moe_experts")
            yield Row("route_topk", f"gate, choice and order {tokens}", partial(_ordered, tokens), needs)


def _ordered(tokens: int, bench: Bench) -> Work:
    """Where the experts' callable has an ``align``: its first part alone, which is nothing where tokens are few."""
    (work, out), site = _routed(True, tokens, bench), site_of(bench, "bfloat16", 4)
    bound = bench.bound("moe_experts", site)
    align = getattr(bound.run, "align", None)
    if align is None:
        raise Unsupported("its moe_experts has no align, so the time of it is unknown")
    experts = bench.kept(("experts", "bfloat16", 4), lambda: random_experts(bench, site))
    x, (_, ids) = bench.normal(tokens, site.hidden_size), out
    workspace = torch.empty(bound.workspace_bytes, dtype=torch.uint8, device=bench.device)
    ours = partial(align, x, ids, bench.packed(bound, experts), workspace)
    calls: Calls = {"m3hal": [partial(_both, call, ours) for call in work.calls["m3hal"]]}
    theirs = bench.peer.align(site, [ids]) if bench.peer and "vllm" in work.calls else None
    if theirs:
        calls["vllm"] = [partial(_both, call, theirs[0]) for call in work.calls["vllm"]]
    return replace(work, calls=calls)


def _route(gated: bool, tokens: int, bench: Bench) -> Work:
    return _routed(gated, tokens, bench)[0]


def _routed(gated: bool, tokens: int, bench: Bench) -> tuple[Work, tuple[torch.Tensor, torch.Tensor]]:
    """The work, and the weights and ids that all its calls write."""
    site = bench.site("moe")
    experts, hidden, k = site.num_experts, site.hidden_size, site.top_k_experts
    bias = torch.randn(experts, device=bench.device) * 0.1
    out = bench.poison(tokens, k, dtype=torch.float32), bench.poison(tokens, k, dtype=torch.int32)
    given = [bench.normal(tokens, experts, dtype=torch.float32) for _ in range(8)]
    chosen = bench.calls("route_topk", site, [(logits, bias) for logits in given], out)
    theirs = bench.peer.route(site, given, bias) if bench.peer else None
    calls: Calls = {"vllm": theirs} if theirs else {}
    calls["m3hal"] = chosen
    floor = Floor(read=4 * tokens * experts, written=8 * tokens * k)
    if gated:
        xs = [bench.normal(tokens, hidden) for _ in given]
        weight = bench.normal(experts, hidden, dtype=torch.float32) * hidden**-0.5
        where = replace(site, weight_format="float32")
        products = [bench.calls("linear", where, [(x, weight)], g)[0] for x, g in zip(xs, given, strict=True)]
        if bench.peer and theirs:
            pairs = zip(bench.peer.gate(xs, weight), theirs, strict=True)
            calls["vllm"] = [partial(_both, gate, route) for gate, route in pairs]
        calls["m3hal"] = [partial(_both, *pair) for pair in zip(products, chosen, strict=True)]
        floor = Floor(read=4 * experts * hidden + 2 * tokens * hidden, flops=6.0 * tokens * hidden * experts)

    def off() -> float:
        """Ids and weights against the definition's, from the same logits; infinite for another choice."""
        weights, ids = bench.exact("route_topk", site, given[0], bias)
        return float((out[0] - weights).abs().max()) if torch.equal(out[1], ids) else float("inf")

    return Work(calls, floor, {"m3hal": off}, 1e-5), out


def _both(first: Call, second: Call) -> None:
    first()
    second()
