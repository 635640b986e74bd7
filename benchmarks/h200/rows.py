# ruff: noqa: B023 (closures run within the iteration that made them)
"""Norms, activation, routing, conversions and products on an H200 beside vLLM's kernels.

python benchmarks/h200/rows.py --peers FOLDER --out FOLDER [SECTION...]

PEERS also holds vLLM's compiled MoE operators, ``thin__moe_C_stable_libtorch.abi3.so.xz``, and the two Triton files of
its ``models/minimax_m3/amd/ops``. GPU time by graph replay over inputs that rotate over more than the cache holds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import harness as h
import torch
from m3hal_triton._launch import programmatic
from m3hal_triton.dequantize import dequantize
from m3hal_triton.linear import linear, linear_fp8
from m3hal_triton.moe_experts import moe_experts
from m3hal_triton.quantize import quantize
from m3hal_triton.rms_norm import add_rms_norm, rms_norm
from m3hal_triton.rope_partial import rope_partial
from m3hal_triton.route_topk import route_topk
from m3hal_triton.swiglu_oai import swiglu_oai

from m3hal.formats import dequantize as numbers
from m3hal.formats import nvfp4, spec_of
from m3hal.formats import quantize as stored
from m3hal.ops import load
from m3hal.ops.rope_partial import rope_table

H, E, K = 6144, 128, 4
TOKENS = (1, 8, 64, 512, 8192)
#: bytes that rotating inputs take at least; the cache holds 60 MB
ROTATE = 160 << 20
EPS = 1e-6


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=h.DEVICE).normal_(0, scale)


def several(size: int, make: Callable[[], object], least: int = 2, most: int = 32) -> list:
    return [make() for _ in range(max(least, min(most, -(-ROTATE // size))))]


def load_moe_ops(folder: str) -> None:
    """vLLM's compiled MoE operators, as :func:`harness.load_cuda_ops`."""
    h.load_cuda_ops(folder)
    path = "/tmp/_moe_C_stable_libtorch.abi3.so"
    if not os.path.exists(path):
        packed = f"{folder}/thin__moe_C_stable_libtorch.abi3.so.xz"
        subprocess.check_call(f"xz -dc {packed} > {path}.{os.getpid()} && mv {path}.{os.getpid()} {path}", shell=True)
    torch.ops.load_library(path)


def floor(bytes_moved: float, products: float = 0.0) -> float:
    """Microseconds, of 4.26 TB/s copied and 752 TFLOP/s."""
    return max(bytes_moved / 4.26e6, products / 752e6)


def norms() -> None:
    from vllm.models.minimax_m3.amd.ops.gemma_rmsnorm import gemma_fused_add_rmsnorm, gemma_rmsnorm

    site, ops = h.site(1, kind="moe"), torch.ops._C
    run, add = rms_norm(site), add_rms_norm(site)
    for tokens in TOKENS:
        xs, rs = (several(tokens * H * 2, lambda: draw(tokens, H)) for _ in range(2))
        w = draw(H, scale=0.1)
        plain, o, o2 = (1 + w.float()).bfloat16(), *(torch.full_like(xs[0], float("nan")) for _ in range(2))
        run(xs[0], w, out=o)
        wide = load("rms_norm").reference(xs[0].double(), w.double(), eps=EPS, weight_offset=1.0)
        error = h.relative(o, wide)
        times = h.graphs(
            {
                "m3hal": [lambda x=x: run(x, w, out=o) for x in xs],
                "vllm amd triton": [lambda x=x: gemma_rmsnorm(x, w, EPS) for x in xs],
                "vllm cuda": [lambda x=x: ops.rms_norm(o, x, plain, EPS) for x in xs],
            }
        )
        h.row("rms_norm", f"{tokens}", times, floor_us=floor(tokens * H * 4), error=error)
        add(xs[0], rs[0], w, out=(o, o2))
        total = xs[0].double() + rs[0].double()
        wide = load("rms_norm").reference(total, w.double(), eps=EPS, weight_offset=1.0)
        error = max(h.relative(o, wide), h.relative(o2, total))
        times = h.graphs(
            {
                "m3hal": [lambda x=x, r=r: add(x, r, w, out=(o, o2)) for x, r in zip(xs, rs, strict=True)],
                "vllm amd triton": [
                    lambda x=x, r=r: gemma_fused_add_rmsnorm(x, r, w, EPS) for x, r in zip(xs, rs, strict=True)
                ],
                "vllm cuda": [
                    lambda x=x, r=r: ops.fused_add_rms_norm(x, r, plain, EPS) for x, r in zip(xs, rs, strict=True)
                ],
            }
        )
        h.row("add_rms_norm", f"{tokens}", times, floor_us=floor(tokens * H * 8), error=error)


def activation() -> None:
    from vllm.models.minimax_m3.amd.ops.swiglu_oai import swiglu_oai_split

    run = swiglu_oai(h.site(1, kind="moe"))
    for inner in (3072, 768):
        for rows in (4, 32, 256, 2048, 32768):
            xs = several(rows * inner * 4, lambda: draw(rows, 2 * inner, scale=3))
            o = torch.full((rows, inner), float("nan"), device=h.DEVICE, dtype=torch.bfloat16)
            run(xs[0], out=o)
            few = slice(0, 256)
            wide = load("swiglu_oai").reference(xs[0][few].double(), alpha=1.702, beta=1.0, limit=7.0)
            error = max(h.relative(o[few], wide), float(o.isnan().any()))
            times = h.graphs(
                {
                    "m3hal": [lambda x=x: run(x, out=o) for x in xs],
                    "vllm cuda": [lambda x=x: torch.ops._C.silu_and_mul_with_clamp(o, x, 7.0, 1.702, 1.0) for x in xs],
                    "vllm amd triton": [lambda x=x: swiglu_oai_split(x, 1.702, 1.0, 7.0) for x in xs],
                }
            )
            h.row("swiglu_oai", f"{rows} x {inner}", times, floor_us=floor(rows * inner * 6), error=error)


class Router:
    """One batch: the gate, the choice and the order of the experts, ours and vLLM's."""

    def __init__(self, tokens: int) -> None:
        site = h.site(1, kind="moe")
        self.tokens, self.route, self.gate = tokens, route_topk(site), linear(site)
        self.weights = several(E * H * 4, lambda: torch.randn(E, H, device=h.DEVICE) * H**-0.5)
        count = len(self.weights) if tokens < 512 else max(2, min(len(self.weights), ROTATE // (tokens * H * 2) + 1))
        self.weights = self.weights[:count]
        self.xs = [draw(tokens, H) for _ in range(count)]
        self.bias = torch.randn(E, device=h.DEVICE) * 0.1
        self.logits = torch.full((tokens, E), float("nan"), device=h.DEVICE)
        self.out = (
            torch.full((tokens, K), float("nan"), device=h.DEVICE),
            torch.full((tokens, K), 77, dtype=torch.int32, device=h.DEVICE),
        )
        self.unused = torch.empty(tokens, K, dtype=torch.int32, device=h.DEVICE)
        pairs = tokens * K
        self.padded = pairs + E * (block_size(tokens) - 1)
        self.sorted = torch.empty(self.padded, dtype=torch.int32, device=h.DEVICE)
        self.blocks = torch.empty(-(-self.padded // block_size(tokens)), dtype=torch.int32, device=h.DEVICE)
        self.count = torch.empty(1, dtype=torch.int32, device=h.DEVICE)
        self.experts = moe_experts(site).run
        rooms = self.experts.room(tokens)
        self.take = partial(rooms.take, torch.empty(rooms.total, dtype=torch.uint8, device=h.DEVICE))

    def our_gate(self, x, w):
        self.gate(x, w, out=self.logits)

    def our_route(self, *_):
        self.route(self.logits, self.bias, out=self.out)

    def our_align(self, x, _):
        order, items, positions, numbers = (
            self.take(name, torch.int32, -1) for name in ("order", "items", "positions", "numbers")
        )
        batch = SimpleNamespace(
            x=x, ids=self.out[1], early=programmatic(x.device), order=order, items=items, total=numbers[-1:],
            tuning=self.experts._tuning(self.tokens * K),
        )  # fmt: skip
        self.experts._begin(batch, self.take, positions)

    def their_gate(self, x, w):
        if self.tokens <= 32:
            torch.ops._C.fp32_router_gemm(self.logits, x, w)
        else:
            torch.mm(x.float(), w.T, out=self.logits)  # what vLLM's linear comes to on this GPU

    def their_route(self, *_):
        torch.ops._moe_C.topk_sigmoid(*self.out, self.unused, self.logits, True, self.bias, 2.0, None)

    def their_align(self, *_):
        torch.ops._moe_C.moe_align_block_size(
            self.out[1], E, block_size(self.tokens), self.sorted, self.blocks, self.count, None, None
        )

    def check(self) -> tuple[float, int]:
        """Worst row of our logits against fp64, and rows whose choice differs from that of the fp64 logits."""
        x, w = self.xs[0], self.weights[0]
        self.our_gate(x, w)
        exact = x.double() @ w.double().T
        self.our_route()
        right = load("route_topk").reference(
            self.logits, self.bias, top_k_experts=K, renormalize=True, routed_scale=2.0
        )
        assert torch.equal(self.out[1], right[1]), "another choice than the definition's from the same logits"
        assert (self.out[0] - right[0]).abs().max() < 2e-6
        chosen = (torch.sigmoid(exact) + self.bias).topk(K, -1).indices.sort(-1).values
        return h.relative(self.logits, exact), int((chosen != self.out[1].sort(-1).values).any(-1).sum())


def block_size(tokens: int) -> int:
    """Of vLLM's alignment, by its own rule for few and many tokens."""
    return 16 if tokens <= 64 else 64 if tokens <= 512 else 128


def alignment() -> None:
    """As :func:`router`, and the order of the experts that moe_experts makes at its beginning."""
    router(align=True)


def router(align: bool = False) -> None:
    for tokens in (1, 8, 64, 512, 8192) if align else (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192):
        r = Router(tokens)
        error, differing = r.check()
        pairs = list(zip(r.xs, r.weights, strict=True))
        parts = {
            "gate": (("our_gate",), ("their_gate",)),
            "route_topk": (("our_route",), ("their_route",)),
            "align": (("our_align",), ("their_align",)),
            "gate + route": (("our_gate", "our_route"), ("their_gate", "their_route")),
        }
        if align:
            together = ("gate", "route", "align")
            parts["gate + route + align"] = tuple(tuple(f"{whose}_{n}" for n in together) for whose in ("our", "their"))
        else:
            del parts["align"]
        for name, (ours, theirs) in parts.items():

            def calls(names):
                return [lambda x=x, w=w: [getattr(r, n)(x, w) for n in names] for x, w in pairs]

            times = h.graphs({"m3hal": calls(ours), "vllm": calls(theirs)})
            facts = {"error": error, "other_choices": differing} if name == "gate" else {}
            h.row(name, f"{tokens}", times, floor_us=floor(E * H * 4 + tokens * H * 2, 6 * tokens * H * E), **facts)


def conversions() -> None:
    for format in ("fp8_e4m3", "mxfp8", "mxfp4", "nvfp4"):
        site = replace(h.site(1, kind="moe"), activation_format=format)
        to, back = quantize(site), dequantize(site)
        for tokens in (1, 64, 8192):
            xs = several(tokens * H * 3, lambda: draw(tokens, H))
            q = to(xs[0])
            few = slice(-256, None)
            exact = load("quantize").reference(xs[0][few].cpu(), activation_format=format)
            same = bool((q.data[few].cpu() == exact.data).all() and (q.scale[few].cpu() == exact.scale).all())
            o = back(q)
            same &= torch.equal(o[few].cpu(), load("dequantize").reference(exact, dtype="bfloat16"))
            qs = [to(x) for x in xs]
            candidates = {"m3hal": [lambda x=x, q=q: to(x, out=q) for x, q in zip(xs, qs, strict=True)]}
            if format == "fp8_e4m3":
                data = q.data.view(torch.float8_e4m3fn)
                candidates["vllm cuda"] = [
                    lambda x=x: torch.ops._C.dynamic_per_token_scaled_fp8_quant(data, x, q.scale, None) for x in xs
                ]
            size = q.data.numel() + q.scale.numel() * q.scale.element_size()
            h.row(f"quantize {format}", f"{tokens}", h.graphs(candidates),
                  floor_us=floor(tokens * H * 2 + size), same_bytes=same)  # fmt: skip
            times = h.graphs({"m3hal": [lambda q=q: back(q, out=o) for q in qs]})
            h.row(f"dequantize {format}", f"{tokens}", times, floor_us=floor(tokens * H * 2 + size))


def products() -> None:
    site, rows = h.site(1, kind="moe"), 2560  # q, k, v and the indexer's of one rank of four
    run, narrow = linear(site), linear_fp8(site)
    for format in ("bfloat16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4"):
        for tokens in (1, 64, 8192):
            w = torch.randn(rows, H, device=h.DEVICE) * H**-0.5
            if format == "nvfp4":
                w = nvfp4.quantize(w, nvfp4.global_scale_of(w))
            elif format != "bfloat16":
                w = stored(w, spec_of(format))
            else:
                w = w.bfloat16()
            plain = w if format == "bfloat16" else numbers(w, torch.bfloat16)
            size = rows * H * {"bfloat16": 2, "fp8_e4m3": 1, "mxfp8": 1.03, "mxfp4": 0.53, "nvfp4": 0.56}[format]
            ws = several(int(size), lambda: replace(w, data=w.data.clone()) if format != "bfloat16" else w.clone())
            ps = several(rows * H * 2, plain.clone, most=8)
            x = draw(tokens, H)
            o = torch.full((tokens, rows), float("nan"), device=h.DEVICE, dtype=torch.bfloat16)
            few = slice(0, 256)
            exact = load("linear").reference(x[few].double(), w if format != "bfloat16" else w.double())
            error = h.relative(run(x, ws[0], out=o)[few], exact)
            candidates = {
                "m3hal": [lambda w=w: run(x, w, out=o) for w in ws],
                "cublas bf16": [lambda p=p: torch.matmul(x, p.T, out=o) for p in ps],
            }
            if format == "fp8_e4m3":
                candidates["m3hal fp8 x fp8"] = [lambda w=w: narrow(x, w, out=o) for w in ws]
            times = h.graphs(candidates, calls=16)
            h.row(f"linear {format}", f"{tokens}", times,
                  floor_us=floor(size + tokens * (H + rows) * 2, 2 * tokens * rows * H), error=error)  # fmt: skip


def rotation() -> None:
    site = h.site(1, kind="sparse_attention")
    run, table = rope_partial(site), rope_table(65536, 64, 5e6, h.DEVICE)
    for tokens in TOKENS:
        xs = several(tokens * 64 * 128 * 2, lambda: draw(tokens, 64, 128))
        positions, o = torch.randint(0, 65536, (tokens,), device=h.DEVICE), torch.empty_like(xs[0])
        exact = load("rope_partial").reference(xs[0].double(), positions, table.double(), rotary_dim=64)
        error = h.relative(run(xs[0], positions, table, out=o), exact)
        times = h.graphs({"m3hal": [lambda x=x: run(x, positions, table, out=o) for x in xs]})
        h.row("rope_partial", f"{tokens}", times, floor_us=floor(tokens * 64 * 128 * 4), error=error)


SECTIONS = {
    "norms": norms,
    "activation": activation,
    "router": router,
    "alignment": alignment,
    "conversions": conversions,
    "products": products,
    "rotation": rotation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []])
    parser.add_argument("--peers", required=True)
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    sys.path.insert(0, f"{given.peers}/peers")
    load_moe_ops(given.peers)
    for name in given.sections or SECTIONS:
        h.ROWS.clear()
        SECTIONS[name]()
        if not h.WARM:
            command = f"python benchmarks/h200/rows.py --peers PEERS --out OUT {name}"
            h.save(Path(given.out) / f"rows_{name}.json", command)


if __name__ == "__main__":
    main()
