# ruff: noqa: B023 (closures run within the iteration that made them)
"""``moe_experts`` on an H200 beside vLLM's kernels: Triton for bf16 and for FP8 per channel, Marlin for MXFP8.

python benchmarks/h200/experts.py --peers FOLDER --out FOLDER [SECTION...]      PEERS as in rows.py

A section is FORMAT,RANKS: the storage format and the ranks that share each expert's inner dimension; FORMAT+ rounds
activations to FP8. GPU time of the whole operator, sorting and the final sum counted; weights are too many for the
cache, routings rotate. Outputs are checked against the definition on three tokens in the same run.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import harness as h
import torch
from m3hal_triton import moe_experts
from rows import load_moe_ops

from m3hal.formats import FORMATS, QTensor, spec_of
from m3hal.ops import ExpertWeights, load
from m3hal.shape import Site

H, E, K = 6144, 128, 4
TOKENS = (1, 8, 64, 512, 8192)
SECTIONS = (
    "mxfp8,1",
    "mxfp8,4",
    "bfloat16,1",
    "bfloat16,4",
    "fp8_e4m3,1",
    "nvfp4,1",
    "mxfp4,1",
    "fp8_e4m3+,1",
    "fp8_e4m3+,4",
)
ROUNDED = {"activation_format": "fp8_e4m3", "double_rounding": "bfloat16"}
READ = 4.6e6  # bytes a microsecond, the H200's ceiling for reading
RATES = {"bf16": 752e6, "fp8": 1524e6}  # operations a microsecond


def bank(rows: int, size: int, format: str) -> torch.Tensor | QTensor:
    """Random weights of a format, about as large as a model's."""
    if format == "bfloat16":
        weight = torch.empty(E, rows, size, dtype=torch.bfloat16, device=h.DEVICE)
        for part in weight.split(8):
            part.normal_(0, size**-0.5)
        return weight
    spec = spec_of(format)
    data = torch.empty(E, rows, size * FORMATS[format].bits // 8, dtype=torch.uint8, device=h.DEVICE)
    for part in data.split(8):
        part.random_(0, 256)
        if FORMATS[format].bits == 8:
            part.bitwise_and_(0xBF)  # numbers up to 2, no NaN
    if spec.group < 0:
        return QTensor(data, spec, torch.rand(E, rows, 1, device=h.DEVICE) * 0.02 + 0.01)
    low = 0x18 if format == "nvfp4" else 119
    scale = torch.randint(low, low + 3, (E, rows, size // spec.group), dtype=torch.uint8, device=h.DEVICE)
    return QTensor(data, spec, scale, torch.full((E, 1, 1), 0.1, device=h.DEVICE) if format == "nvfp4" else None)


def routings(tokens: int, count: int, skew: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(weights, ids); skew: how much likelier an expert is than the next, in units of its logit."""
    generator = torch.Generator().manual_seed(tokens)
    found = []
    for _ in range(count):
        noise = -torch.log(-torch.log(torch.rand(tokens, E, generator=generator)))
        weight, ids = (noise - skew * torch.arange(E).log1p()).topk(K, -1)
        weight = torch.softmax(weight, -1) * 2
        found.append((weight.to(h.DEVICE), ids.int().to(h.DEVICE)))
    return found


def fused_triton(experts: ExpertWeights, config: dict[str, int] | None) -> Callable[..., torch.Tensor]:
    """vLLM's Triton experts; config: tiles instead of the table's."""
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, apply_moe_activation

    numbers = ApplyMoEActivationConfig(clamp_limit=7.0, alpha=1.702, beta=1.0)
    fused_moe.apply_moe_activation = functools.partial(apply_moe_activation, activation_config=numbers)
    given = {}
    weights = experts.w13, experts.w2
    if isinstance(experts.w13, QTensor):
        weights = tuple(w.data.view(torch.float8_e4m3fn) for w in weights)
        scales = {"w1_scale": experts.w13.scale, "w2_scale": experts.w2.scale}
        fused_moe.moe_kernel_quantize_input = _quantised
        given = {"use_fp8_w8a8": True, "per_channel_quant": True, **scales}

    def run(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if config is not None:
            _config_module(fused_moe).get_config = lambda: config
        return fused_moe.fused_experts_impl(x, *weights, weight, ids, activation="swigluoai_uninterleave", **given)

    return run


def _quantised(A: torch.Tensor, A_scale: object, quant_dtype: object, **_: object) -> tuple[object, object]:
    """What the peer's experts quantise their inputs with, by its names: its CUDA operator, a scale for each row."""
    if quant_dtype is None:
        return A, A_scale
    codes, scales = torch.empty_like(A, dtype=torch.float8_e4m3fn), torch.empty(len(A), 1, device=A.device)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(codes, A, scales, None)
    return codes, scales


def _config_module(module: ModuleType) -> ModuleType:
    """Where fused_moe asks for an overriding configuration."""
    return sys.modules[module.fused_experts_impl.__module__.rpartition(".")[0]]


def marlin(experts: ExpertWeights, inner: int) -> Callable[..., torch.Tensor]:
    """vLLM's path on Hopper for an MXFP8 checkpoint."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.scalar_type import scalar_types

    lanes = [i + 8 * j for i in range(8) for j in range(8)]

    def repacked(w: torch.Tensor) -> torch.Tensor:
        made = None
        for e in range(E):
            one = torch.ops._C.gptq_marlin_repack(
                w[e].view(torch.int32).T.contiguous(), w.shape[2], w.shape[1], 8, False
            )
            made = torch.empty(E, *one.shape, dtype=one.dtype, device=h.DEVICE) if made is None else made
            made[e] = one
        return made

    def permuted(scale: torch.Tensor) -> torch.Tensor:
        made = []
        for one in scale.view(torch.float8_e8m0fnu).to(torch.bfloat16):
            rows = one.T.contiguous().reshape(-1, 64)[:, lanes].reshape(-1, scale.shape[1]).contiguous()
            rows = rows.view(-1, 4)[:, [0, 2, 1, 3]].view(rows.size(0), -1).to(torch.float8_e8m0fnu)
            made.append(rows.view(torch.uint8))
        return torch.stack(made).view(torch.float8_e8m0fnu)

    codes = [repacked(w.data) for w in (experts.w13, experts.w2)]
    scales = [permuted(w.scale) for w in (experts.w13, experts.w2)]
    locks, kind = torch.zeros(132 * 4, dtype=torch.int, device=h.DEVICE), scalar_types.float8_e4m3fn.id
    gemm = torch.ops._moe_C.moe_wna16_marlin_gemm

    def run(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        tokens = len(x)
        block = next((b for b in (8, 16, 32, 48) if tokens * K / E / b < 0.9), 64)
        order, owners, padded = moe_align_block_size(ids, block, E, None, ignore_invalid_experts=True)
        room = torch.empty(tokens * K * max(2 * inner, H), dtype=torch.bfloat16, device=h.DEVICE)
        first, last = room[: tokens * K * 2 * inner].view(-1, 2 * inner), room[: tokens * K * H].view(-1, H)
        middle = torch.empty(tokens * K, inner, dtype=torch.bfloat16, device=h.DEVICE)
        same = (locks, order, owners, padded, weight, block)
        end = (False, True, False, -1, -1, -1)
        first = gemm(x, first, codes[0], None, scales[0], None, None, None, *same, K, False, kind, tokens, 2 * inner, H,
                     *end)  # fmt: skip
        torch.ops._C.silu_and_mul_with_clamp(middle, first, 7.0, 1.702, 1.0)
        last = gemm(middle, last, codes[1], None, scales[1], None, None, None, *same, 1, True, kind, tokens * K, H,
                    inner, *end)  # fmt: skip
        return last.view(tokens, K, H).sum(1)

    return run


def exact(site: Site, x: torch.Tensor, routing: tuple[torch.Tensor, ...], experts: ExpertWeights, rows: list[int]):
    """The definition on some tokens, with activations as they are."""
    op = load("moe_experts")
    weight, ids = routing
    chosen = ids[rows].unique()
    local = torch.searchsorted(chosen, ids[rows]).int()
    few = ExpertWeights(*(w[chosen.long()] for w in (experts.w13, experts.w2)))
    if not isinstance(few.w13, QTensor):
        few = ExpertWeights(few.w13.float(), few.w2.float())
    return op.reference(x[rows].float(), weight[rows], local, few, **op.static_values(site))


def section(format: str, ranks: int, peers: bool, asked_tokens: tuple[int, ...] = TOKENS) -> None:
    rounds, name = format.endswith("+"), format.rstrip("+")
    inner = 3072 // ranks
    experts = ExpertWeights(bank(2 * inner, H, name), bank(H, inner, name))
    site = replace(h.site(ranks, kind="moe"), weight_format=name)
    kernel = (moe_experts.fp8_activations if rounds else moe_experts.moe_experts)(site)
    packed = kernel.prepare_weights(experts)
    rivals: dict[str, Callable[..., torch.Tensor]] = {}
    if peers and name == "bfloat16":
        rivals = {"vllm": fused_triton(experts, None)}
    elif peers and name == "mxfp8":
        rivals = {"vllm marlin": marlin(experts, inner)}
    elif peers and rounds:
        tuned = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 16, "SPLIT_K": 1}
        rivals = {"vllm tuned": fused_triton(experts, tuned | {"num_warps": 8, "num_stages": 3})}
    if h.WARM:
        workspaces = [torch.empty(kernel.workspace_bytes, dtype=torch.uint8, device=h.DEVICE)]
    else:
        workspaces = [torch.empty(kernel.workspace_bytes, dtype=torch.uint8, device=h.DEVICE) for _ in range(2)]
    asked = [(tokens, 0.0) for tokens in asked_tokens if tokens == 8192 or not rounds]
    if not rounds and name in ("mxfp8", "bfloat16"):
        asked += [(tokens, 1.0) for tokens in (64, 8192) if tokens in asked_tokens]
    for tokens, skew in asked:
        count = 8 if tokens <= 64 else 2
        given = routings(tokens, count, skew)
        xs = [torch.randn(tokens, H, device=h.DEVICE).bfloat16() for _ in range(count)]
        calls = {
            rival: [lambda i=i, run=run: run(xs[i], *given[i]) for i in range(count)] for rival, run in rivals.items()
        }
        calls["m3hal"] = [
            lambda i=i: kernel.run(xs[i], *given[i], packed, workspace=workspaces[i % len(workspaces)])
            for i in range(count)
        ]
        rows = sorted({0, tokens // 2, tokens - 1})
        wanted = exact(site, xs[0], given[0], experts, rows)
        errors = {f"error {who}": h.relative(made[0]()[rows], wanted) for who, made in calls.items()}
        times = h.graphs(calls, calls=8) if tokens <= 512 else h.events({who: made[0] for who, made in calls.items()})
        hit = sum(len(ids.unique()) for _, ids in given) / count
        bits = FORMATS[name].bits + (FORMATS[name].scale_bits / spec_of(name).group if spec_of(name).group > 0 else 0)
        rate = RATES["fp8" if rounds else "bf16"]
        floor = max(hit * 3 * H * inner * bits / 8 / READ, tokens * K * 6 * H * inner / rate)
        label = f"TP{ranks} {tokens}{' skewed' if skew else ''} {format}"
        h.row("moe_experts", label, times, floor_us=floor, experts_hit=hit, **errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", default=SECTIONS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--peers")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.peers:
        sys.path.insert(0, f"{options.peers}/peers")
        load_moe_ops(options.peers)
    for name in options.sections:
        format, ranks = name.split(",")
        section(format, int(ranks), bool(options.peers), tuple(options.tokens))
        torch.cuda.empty_cache()
    if not h.WARM:
        options.out.mkdir(parents=True, exist_ok=True)
        h.save(options.out / "experts.json", " ".join(["python", *sys.argv]))


if __name__ == "__main__":
    main()
