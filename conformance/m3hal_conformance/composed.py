"""One sparse layer, composed of a backend's operators as the model composes them, against fp64.

indexer -> top-k -> sparse attention -> o_proj -> add and norm -> router -> experts. Green operators do not make a right
layer: what one hands to the next must mean the same to both. Selections are judged by the regret of their exact scores,
and the oracle then follows the backend's choice, because one swapped near-tie is no error of what comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m3hal import ops
from m3hal.dispatch import Bound
from m3hal.layouts import PagedCache
from m3hal.ops import ExpertWeights, QKNorms, SeqMeta
from m3hal.ops.rope_partial import rope_table
from m3hal.shape import Site
from m3hal_conformance.bounds import worst_row
from m3hal_conformance.case import Rng, make_site
from m3hal_conformance.harness import widened
from m3hal_conformance.legitimate import EVALUATIONS
from m3hal_conformance.results import CheckResult, Result
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite._paged import filled, index_layout, kv_layout, requests
from m3hal_conformance.trees import map_tensors
from m3hal_conformance.trial import Unsupported

#: operators of the layer and the site that each runs at
PARTS: Mapping[str, str] = {
    "rms_norm": "sparse_attention",
    "linear": "sparse_attention",
    "qk_norm_rope_insert": "sparse_attention",
    "select_blocks": "sparse_attention",
    "sparse_attention": "sparse_attention",
    "add_rms_norm": "sparse_attention",
    "route_topk": "moe",
    "moe_experts": "moe",
}
HIDDEN, INNER, EXPERTS = 512, 96, 8
#: times the error of a legitimate evaluation of the same layer
C = {"float32": 8.0, "bfloat16": 2.5}
Calls = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Layer:
    """The weights and the batch of one layer; everything a mapping of tensors, so that it can be widened."""

    x: Tensor
    weights: Mapping[str, Tensor]
    norms: QKNorms
    kv: PagedCache
    index_cache: PagedCache
    experts: ExpertWeights
    meta: SeqMeta
    positions: Tensor
    cos_sin: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Found:
    """What a run of the layer gives. blocks, experts: its selections."""

    out: Tensor
    blocks: Tensor
    experts: Tensor


def sites(dtype: str) -> dict[str, Site]:
    """Eight query heads on one kv head, as on one of eight ranks; a small hidden size and eight experts."""
    small = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts": EXPERTS, "num_local_experts": EXPERTS}
    return {kind: make_site(kind, dtype, tensor_parallel=8, **small) for kind in ("sparse_attention", "moe")}


def make_layer(site: Site, name: str) -> Layer:
    """A chunk of three tokens and a decode token, over contexts beyond top-k blocks."""
    rng, dtype = Rng(f"layer/{name}"), getattr(torch, site.dtype)
    held = requests(rng, [(3, 2600), (1, 3000)], site.page_size)
    dim = site.head_dim
    row = (site.num_q_heads + 2 * site.num_kv_heads + site.num_index_heads + 1) * dim

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * rng.normal(*shape)).to(dtype)

    keys = [rng.normal(n, site.num_kv_heads, dim) for _, n in held.lengths]
    values = [rng.normal(n, site.num_kv_heads, dim) for _, n in held.lengths]
    index = [rng.normal(n, 1, dim) for _, n in held.lengths]
    weights = {
        "norm": draw(HIDDEN, scale=0.2), "qkv": draw(row, HIDDEN, scale=HIDDEN**-0.5),
        "o": draw(HIDDEN, site.num_q_heads * dim, scale=0.2), "norm2": draw(HIDDEN, scale=0.2),
        "gate": rng.normal(EXPERTS, HIDDEN) * HIDDEN**-0.5, "bias": 0.1 * rng.normal(EXPERTS),
    }  # fmt: skip
    return Layer(
        x=draw(held.tokens, HIDDEN), weights=weights,
        norms=QKNorms(*(draw(dim, scale=0.2) for _ in range(4))),
        kv=filled(held, kv_layout(site), keys, values, rng),
        index_cache=filled(held, index_layout(site), index, None, rng),
        experts=ExpertWeights(draw(EXPERTS, 2 * INNER, HIDDEN, scale=0.1), draw(EXPERTS, HIDDEN, INNER, scale=0.1)),
        meta=held.meta, positions=held.meta.positions(held.tokens), cos_sin=rope_table(4096, site.rotary_dim, 5e6),
        slots=held.query_slots(),
    )  # fmt: skip


def run_layer(layer: Layer, calls: Calls, follow: Found | None = None) -> tuple[Found, Tensor, Tensor]:
    """The layer through ``calls``; with ``follow``, its selections replaced by those.

    Returns what was found, the index queries and the router's choice scores, for judging selections.
    """
    w = layer.weights
    h = calls["rms_norm"](layer.x, w["norm"])
    qkv = calls["linear"](h, w["qkv"])
    q, index_q = calls["qk_norm_rope_insert"](
        qkv, layer.norms, layer.positions, layer.cos_sin, layer.kv, layer.index_cache, layer.slots, layer.slots
    )
    blocks = follow.blocks if follow else calls["select_blocks"](index_q, layer.index_cache, layer.meta)
    attended = calls["sparse_attention"](q, layer.kv, blocks, layer.meta)
    projected = calls["linear"](attended.flatten(1), w["o"])
    h2, _ = calls["add_rms_norm"](projected, layer.x, w["norm2"])
    logits = h2.to(w["gate"].dtype) @ w["gate"].T
    weights, ids = calls["route_topk"](logits, w["bias"])
    choice = torch.sigmoid(logits) + w["bias"]
    if follow:
        ids = follow.experts
        chosen = torch.sigmoid(logits).gather(-1, ids.long())
        weights = chosen / chosen.sum(-1, keepdim=True) * 2.0
    out = calls["moe_experts"](h2, weights, ids, layer.experts)
    return Found(out, blocks, ids), index_q, choice


def check_layer(runner: Runner, dtype: str) -> Result:
    """The composed layer of a backend; what it lacks comes from the reference, and the reason says so."""
    name = f"layer/sparse_decoder/{dtype}"
    where = sites(dtype)
    site = where["sparse_attention"]
    bound: dict[str, Bound] = {}
    for operator, kind in PARTS.items():
        try:
            offer = runner.offer(operator, where[kind], "hnd")
            if offer.page_map is None:
                bound[operator] = offer.bound
        except Unsupported:
            continue
    if len(bound) < 2:
        return Result(
            name, "layer", dtype, "unsupported", reason="it has fewer than two operators of the layer in public pages"
        )
    calls: Calls = {**_references(where), **{op: partial(_call, b, runner.torch_device) for op, b in bound.items()}}
    try:
        layer = map_tensors(make_layer(site, dtype), lambda tensor: tensor.to(runner.torch_device))
        found, _, _ = run_layer(layer, calls)
    except Exception as error:
        sentence = f"the layer raised {type(error).__name__}: {error}"
        return Result(name, "layer", dtype, "fail", (CheckResult("composed", False, None, sentence),))
    lacking = sorted(set(PARTS) - set(bound))
    note = f"the reference supplies {', '.join(lacking)}" if lacking else ""
    checks = _judge(site, where, dtype, found)
    status = "pass" if all(check.passed for check in checks) else "fail"
    return Result(name, "layer", dtype, status, tuple(checks), note)  # type: ignore[arg-type]


def _judge(site: Site, where: Mapping[str, Site], dtype: str, found: Found) -> list[CheckResult]:
    layer = make_layer(site, dtype)
    found = map_tensors(found, Tensor.cpu)
    exact = Layer(**widened({name: getattr(layer, name) for name in Layer.__dataclass_fields__}))
    oracle, index_q, choice = run_layer(exact, _references(where), found)
    error = worst_row(found.out, oracle.out).error
    bound = C[dtype] * _legitimate_error(site, where, dtype)
    sentence = f"the layer's output is {error:.3e} from fp64 (worst row, relative L2); the bound is {bound:.3e}"
    near = 2e-2 if dtype == "bfloat16" else 1e-4
    scores = ops.load("block_scores").reference(index_q, exact.index_cache, exact.meta, block_size=site.block_size)
    regret = max(_block_regret(scores, found.blocks, exact.meta, site), _expert_regret(choice, found.experts))
    chosen = (
        f"a selection is worse than one that it left out by {regret:.3e} of the scores' size; {near:.0e} is allowed"
    )
    return [
        CheckResult("composed", error <= bound, error / bound, "" if error <= bound else sentence),
        CheckResult("regret", regret <= near, regret / near, "" if regret <= near else chosen),
    ]


def _legitimate_error(site: Site, where: Mapping[str, Site], dtype: str) -> float:
    """Worst row of the same layer through legitimate evaluations, against fp64 with the same selections."""
    calls = {**_references(where)}
    for operator, kind in PARTS.items():
        if operator in EVALUATIONS:
            calls[operator] = partial(EVALUATIONS[operator], where[kind], {})
    found, _, _ = run_layer(make_layer(site, dtype), calls)
    layer = make_layer(site, dtype)
    exact = Layer(**widened({name: getattr(layer, name) for name in Layer.__dataclass_fields__}))
    return worst_row(found.out, run_layer(exact, _references(where), found)[0].out).error


def _references(where: Mapping[str, Site]) -> dict[str, Callable[..., Any]]:
    return {
        operator: partial(ops.load(operator).reference, **ops.load(operator).static_values(where[kind]))
        for operator, kind in PARTS.items()
    }


def _call(bound: Bound, device: torch.device, *inputs: Any) -> Any:
    """One call of a bound operator, its batch planned and its weights packed."""
    given = []
    for value in inputs:
        if isinstance(value, SeqMeta) and bound.plan_batch:
            storage = torch.empty(bound.plan_bytes, dtype=torch.uint8, device=device) if bound.plan_bytes else None
            value = bound.plan_batch(value, storage)
        elif isinstance(value, ExpertWeights) and bound.prepare_weights:
            value = bound.prepare_weights(value)
        given.append(value)
    options: dict[str, Any] = {}
    if bound.workspace_bytes:
        options["workspace"] = torch.empty(bound.workspace_bytes, dtype=torch.uint8, device=device)
    return bound.run(*given, **options)


def _block_regret(scores: Tensor, ids: Tensor, meta: SeqMeta, site: Site) -> float:
    worst = 0.0
    visible = meta.positions(len(ids)) // site.block_size + 1
    for token in range(len(ids)):
        end = int(visible[token])
        for head in range(ids.shape[1]):
            row, chosen = scores[token, head, :end], [b for b in ids[token, head].tolist() if b >= 0]
            free = [b for b in chosen if b < end - site.local_blocks]
            left = [b for b in range(end - site.local_blocks) if b not in chosen]
            if not chosen or end - 1 not in chosen or len(chosen) != min(end, site.top_k_blocks):
                return float("inf")
            if free and left:
                worst = max(worst, float((row[left].max() - row[free].min()).clamp(min=0) / row.abs().max()))
    return worst


def _expert_regret(choice: Tensor, ids: Tensor) -> float:
    best = choice.sort(-1, descending=True).values[:, : ids.shape[1]]
    taken = choice.gather(-1, ids.long()).sort(-1, descending=True).values
    return float((best - taken).abs().max())
