# ruff: noqa: B023 (closures run within the iteration that made them)
"""Norm, RoPE and cache insertion on an H200 beside vLLM's CUDA operator, and cache writes by themselves.

python benchmarks/h200/insert.py --peers FOLDER --out FOLDER

The peer is vLLM's bf16 insertion in every row: it writes no NVFP4 on this GPU. It also rewrites k and v in the row.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import harness as h
import torch
from m3hal_triton.kv_write import kv_write
from m3hal_triton.qk_norm_rope_insert import qk_norm_rope_insert

from m3hal.layouts import CACHE_FORMATS, KVLayout, PagedCache
from m3hal.ops import QKNorms, load
from m3hal.ops.rope_partial import rope_table

PAGES = 512
#: (main cache, index cache)
FORMATS = {"bf16": ("bfloat16",) * 2, "fp8": ("fp8_e4m3",) * 2, "nvfp4": ("nvfp4",) * 2, "mxfp4": ("nvfp4", "mxfp4")}


def cache(format: str, heads: int, values: bool) -> PagedCache:
    layout = KVLayout(CACHE_FORMATS[format][0], format, 128, heads, 128, values)
    made = layout.empty(PAGES, h.DEVICE)
    made.buf.view(torch.uint8).zero_()
    if values and format in ("fp8_e4m3", "nvfp4"):
        scales = (torch.tensor(scale, device=h.DEVICE) for scale in (0.01, 0.02))
        return PagedCache(made.buf, layout, *scales)
    return made


def numbers(*caches: PagedCache) -> torch.Tensor:
    """All that they hold, fp32 [n, 128]."""
    slots = torch.arange(PAGES * 128, device=h.DEVICE)
    read = load("kv_read").reference
    return torch.cat([part.flatten(0, 1) for c in caches for part in read(c, slots) if part is not None])


def stored_bytes(*caches: PagedCache) -> int:
    """Of one token."""
    return sum(c.layout.bytes_per_token() for c in caches)


class Case:
    """One batch and what every format needs of it."""

    def __init__(self, tp: int, tokens: int) -> None:
        self.site, self.tokens = h.site(tp), tokens
        self.q_heads, self.heads = self.site.num_q_heads, self.site.num_kv_heads
        width = (self.q_heads + 3 * self.heads + 1) * 128
        count = max(2, min(16, -(-2 * 10**8 // (tokens * width * 2))))
        self.rows = [torch.randn(tokens, width, device=h.DEVICE, dtype=torch.bfloat16) for _ in range(count)]
        self.norms = QKNorms(*(torch.randn(128, device=h.DEVICE, dtype=torch.bfloat16) * 0.1 for _ in range(4)))
        self.table = rope_table(65536, 64, 5e6, h.DEVICE)
        self.narrow = self.table.bfloat16()  # the peer wants the row's dtype: half the bytes, and a rounded angle
        self.positions = torch.randint(0, 65536, (tokens,), device=h.DEVICE)
        self.slots = torch.randperm(PAGES * 128, device=h.DEVICE)[:tokens]
        self.run = qk_norm_rope_insert(self.site)

    def out(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(
            torch.full((self.tokens, n, 128), float("nan"), device=h.DEVICE, dtype=torch.bfloat16)
            for n in (self.q_heads, self.heads)
        )

    def ours(self, row, caches, out):
        self.run(row, self.norms, self.positions, self.table, *caches, self.slots, self.slots, out=out)

    def theirs(self, row, caches, out):
        norms, flat = self.norms, caches[1].buf.view(PAGES, 128, 128)
        torch.ops._C.fused_minimax_m3_qknorm_rope_kv_insert(
            row, norms.q, norms.k, self.narrow, self.positions, self.q_heads, self.heads, 64, self.site.eps,
            norms.index_q, norms.index_k, self.heads, self.slots, self.slots, caches[0].buf, flat, 128,
            out[0].view(self.tokens, -1), out[1].view(self.tokens, -1), "auto", False, None, 1.0, None, None,
        )  # fmt: skip

    def exact(self, caches):
        """The definition in fp32, into caches of the same formats: outputs and caches."""
        op = load("qk_norm_rope_insert")
        copies = [replace(c, buf=torch.zeros_like(c.buf)) for c in caches]
        wide = QKNorms(*(getattr(self.norms, n).float() for n in ("q", "k", "index_q", "index_k")))
        out = op.reference(
            self.rows[0].float(), wide, self.positions, self.table, *copies, self.slots, self.slots,
            **op.static_values(self.site),
        )  # fmt: skip
        return out, copies


def insertion(tp: int, tokens: int) -> None:
    """One row for each format."""
    case = Case(tp, tokens)
    peer_caches = cache("bfloat16", case.heads, True), cache("bfloat16", 1, False)
    for name, formats in FORMATS.items():
        caches, out, peer_out = (
            (cache(formats[0], case.heads, True), cache(formats[1], 1, False)),
            case.out(),
            case.out(),
        )
        case.theirs(case.rows[0].clone(), peer_caches, peer_out)
        case.ours(case.rows[0], caches, out)
        exact, wanted = case.exact(caches)
        errors = {"error_m3hal": max(h.relative(o, e) for o, e in zip(out, exact, strict=True))}
        errors["error_vllm"] = max(h.relative(o, e) for o, e in zip(peer_out, exact, strict=True))
        mine, theirs = numbers(*caches), numbers(*wanted)
        errors["cache_differs"] = float((mine != theirs).float().mean()) * len(mine) * 128 / (theirs != 0).sum().item()
        calls = {
            "vllm": [lambda r=r: case.theirs(r, peer_caches, peer_out) for r in case.rows],
            "m3hal": [lambda r=r: case.ours(r, caches, out) for r in case.rows],
        }
        times = h.graphs(calls, calls=16)
        size = tokens * (256 * (2 * (case.q_heads + case.heads) + 2 * case.heads + 1) + stored_bytes(*caches))
        h.row("insert", f"TP{tp} {tokens} {name}", times, floor_us=size / 4.26e6, **errors)


def writing(tp: int, tokens: int) -> None:
    """``kv_write`` alone; no peer is measured."""
    case = Case(tp, tokens)
    vectors = [torch.randn(2, tokens, case.heads, 128, device=h.DEVICE, dtype=torch.bfloat16) for _ in range(8)]
    for format in ("bfloat16", "fp8_e4m3", "nvfp4"):
        ours, theirs = cache(format, case.heads, True), cache(format, case.heads, True)
        write = kv_write(case.site)
        write(ours, *vectors[0], case.slots)
        load("kv_write").reference(theirs, *vectors[0], case.slots)
        assert torch.equal(ours.buf.view(torch.uint8), theirs.buf.view(torch.uint8))
        times = h.graphs({"m3hal": [lambda v=v: write(ours, *v, case.slots) for v in vectors]}, calls=16)
        size = tokens * (512 * case.heads + stored_bytes(ours))
        h.row("kv_write", f"TP{tp} {tokens} {format}", times, floor_us=size / 4.26e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    h.load_cuda_ops(options.peers)
    for tp in (1, 4):
        for tokens in (1, 64, 512, 8192):
            insertion(tp, tokens)
        writing(tp, 8192)
    if not h.WARM:
        options.out.mkdir(parents=True, exist_ok=True)
        h.save(options.out / "insert.json", " ".join(["python", *sys.argv]))


if __name__ == "__main__":
    main()
