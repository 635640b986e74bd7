"""The routed experts. The floor reads the experts that were hit once, and x, and writes the output.

Routing is uniform, or skewed: an expert's logit falls with the logarithm of its number. Four-bit weights have no peer
of their own format here: they stand beside our FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from m3hal.formats import QTensor, spec_of
from m3hal.ops import ExpertWeights
from m3hal.shape import Site
from m3hal_conformance.bench import Bench, Calls, Floor, Row, Work
from m3hal_conformance.bench.bench import nbytes, relative, sample
from m3hal_conformance.bench.rows import RANKS

FORMATS = {"bfloat16": "bf16", "mxfp8": "mxfp8", "fp8_e4m3": "fp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
TOKENS = (1, 8, 64, 512, 8192)
#: (format, tokens) of skewed routing
SKEWED = tuple((format, tokens) for format in ("mxfp8", "bfloat16") for tokens in (64, 8192))
#: tokens up to which four-bit weights stand beside FP8 ones
FEW = 64
#: traits of FP8 weights times activations rounded to FP8
ROUNDED = ("activation_format=fp8_e4m3", "double_rounding=bfloat16")
#: vLLM's FP8 experts round their activations to FP8, ours take them as they are
LIMIT = 0.02


def rows(small: bool) -> Iterator[Row]:
    for format, short in FORMATS.items():
        for ranks in (4,) if small else RANKS:
            name, made = f"{short} TP{ranks}", partial(_experts, format, ranks)
            for tokens in (3,) if small else TOKENS:
                yield Row("moe_experts", f"{name} {tokens}", partial(made, tokens))
            for tokens in (5,) if small else [count for kind, count in SKEWED if kind == format]:
                yield Row("moe_experts", f"{name} {tokens} skewed", partial(made, tokens, skew=1.0))
            if format == "fp8_e4m3" and not small:
                rounded = partial(made, 8192, require=ROUNDED)
                yield Row("moe_experts", f"{name} 8192 fp8 activations", rounded, ("moe_experts", *ROUNDED))


def _experts(
    format: str, ranks: int, tokens: int, bench: Bench, *, skew: float = 0.0, require: tuple[str, ...] = ()
) -> Work:
    site = site_of(bench, format, ranks)
    experts = bench.kept(("experts", format, ranks), lambda: random_experts(bench, site))
    given = [routed(bench, site, tokens, skew) for _ in range(8 if tokens <= 64 else 2)]
    out = bench.poison(tokens, site.hidden_size)
    calls: Calls = dict(bench.peer.experts(site, experts, given)) if bench.peer else {}
    if format == "fp8_e4m3" and not require:
        calls = {f"{name} fp8 activations": several for name, several in calls.items()}
    four_bits = format.endswith("fp4")
    if four_bits and tokens <= FEW:
        fp8 = site_of(bench, "fp8_e4m3", ranks)
        rival = bench.kept(("rival experts", ranks), lambda: random_experts(bench, fp8))
        inputs = [(*values, rival) for values in given]
        other = torch.empty_like(out)
        calls |= bench.rival("our fp8", "moe_experts", fp8, inputs, other, keep="rival packed")
    inputs = [(*values, experts) for values in given]
    calls["m3hal"] = bench.calls("moe_experts", site, inputs, out, require=require)
    chosen = sample(tokens)

    def off() -> float:
        x, weights, ids = (value[chosen] for value in given[0])
        return relative(
            out[chosen], bench.exact("moe_experts", site, x.double(), weights, ids, experts, require=require)
        )

    hit = sum(len(set(ids.flatten().tolist())) for _, _, ids in given) / len(given)
    size = hit / site.num_local_experts * nbytes(experts) + 4 * tokens * site.hidden_size
    flops = 6.0 * tokens * site.top_k_experts * site.hidden_size * site.intermediate_size
    timing = "chained" if tokens <= 512 else "single"
    absent = ""
    if not any(name.startswith("vllm") for name in calls):
        absent = f"of vllm no {format} experts are timed" if four_bits else "vllm's compiled operators are not loaded"
    floor = Floor(read=size, flops=flops, unit="float8" if require else "bfloat16")
    return Work(calls, floor, {"m3hal": off}, LIMIT, timing, {"experts_hit": hit}, absent)  # type: ignore[arg-type]


def site_of(bench: Bench, format: str, ranks: int) -> Site:
    """The model's, or in a small bench one of a few small experts."""
    site = replace(bench.site("moe", ranks), weight_format=format)
    if bench.small:
        site = replace(site, num_experts=8, num_local_experts=8, hidden_size=256, intermediate_size=128)
    return site


def routed(bench: Bench, site: Site, tokens: int, skew: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weights and ids. skew: by how much an expert's logit falls with the logarithm of its number."""
    chance = torch.rand(tokens, site.num_local_experts, device=bench.device, generator=bench.generator)
    noise = -torch.log(-torch.log(chance.clamp(1e-7, 1 - 1e-7)))
    falling = skew * torch.arange(site.num_local_experts, device=bench.device).log1p()
    weights, ids = (noise - falling).topk(site.top_k_experts, -1)
    weights = torch.softmax(weights, -1) * site.routed_scale
    return bench.normal(tokens, site.hidden_size), weights, ids.int()


def random_experts(bench: Bench, site: Site) -> ExpertWeights:
    """Codes and scales drawn at random, so that nothing is as large as fp32 weights; about as large as real ones."""
    sizes = (2 * site.intermediate_size, site.hidden_size), (site.hidden_size, site.intermediate_size)
    w13, w2 = (random_matrix(bench, site.weight_format, site.num_local_experts, *size) for size in sizes)
    return ExpertWeights(w13, w2)


def random_matrix(bench: Bench, format: str, experts: int, rows: int, columns: int) -> torch.Tensor | QTensor:
    """[experts, rows, columns] of random codes and scales."""
    if format == "bfloat16":
        made = torch.empty(experts, rows, columns, dtype=torch.bfloat16, device=bench.device)
        for part in made:
            part.normal_(0, 0.02, generator=bench.generator)
        return made
    spec = spec_of(format)
    codes = _bytes(bench, (experts, rows, spec.data_bytes(columns)), 0, 256)
    if format in ("fp8_e4m3", "mxfp8"):
        codes &= 0xB7  # less than 1, and no NaN
    if format == "fp8_e4m3":
        scale = torch.rand(experts, rows, 1, device=bench.device, generator=bench.generator) * 0.02 + 0.02
        return QTensor(codes, spec, scale)
    low, high = (0x20, 0x23) if format == "nvfp4" else (120, 123)
    groups = columns // spec.group
    scale = _bytes(bench, (experts, rows, groups), low, high)
    world = torch.full((experts, 1, 1), 2.0**-4, device=bench.device) if format == "nvfp4" else None
    return QTensor(codes, spec, scale, world)


def _bytes(bench: Bench, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    made = torch.empty(shape, dtype=torch.uint8, device=bench.device)
    for part in made:
        part.random_(low, high, generator=bench.generator)
    return made
