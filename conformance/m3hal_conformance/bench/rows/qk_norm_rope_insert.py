"""Norms, RoPE and cache insertion. vLLM's operator stands beside every format in bf16, and in that format if it can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from m3hal import ops
from m3hal.layouts import CACHE_FORMATS, KVLayout, PagedCache
from m3hal.ops import QKNorms
from m3hal.ops.rope_partial import rope_table
from m3hal_conformance.bench import Bench, Calls, Floor, Row, Work, Wrong
from m3hal_conformance.bench.bench import relative
from m3hal_conformance.bench.rows import RANKS

#: (main cache, index cache)
KINDS = {"bf16": ("bfloat16",) * 2, "fp8": ("fp8_e4m3",) * 2, "nvfp4": ("nvfp4",) * 2, "mxfp4": ("nvfp4", "mxfp4")}
#: the peer's columns, called plainly "vllm" beside the same formats: (main cache, index cache)
THEIRS = {
    "vllm bf16": ("bfloat16",) * 2, "vllm fp8": ("fp8_e4m3",) * 2, "vllm nvfp4 with bf16 keys": ("nvfp4", "bfloat16"),
}  # fmt: skip
#: of numbers in a cache that differ: the order of a sum may move one in a hundred thousand to its neighbour
DIFFER = 1e-3


def rows(small: bool) -> Iterator[Row]:
    for ranks in RANKS:
        for tokens in (5,) if small else (1, 64, 512, 8192):
            for kind in KINDS:
                yield Row("qk_norm_rope_insert", f"{kind} TP{ranks} {tokens}", partial(_insert, kind, ranks, tokens))


def _insert(kind: str, ranks: int, tokens: int, bench: Bench) -> Work:
    main, index = KINDS[kind]
    site = replace(bench.site(tensor_parallel=ranks), kv_format=main, index_format=index)
    q_heads, heads = site.num_q_heads, site.num_kv_heads
    width = (q_heads + 3 * heads + 1) * 128
    rows = [bench.normal(tokens, width) for _ in range(max(2, min(16, bench.rotations(2 * tokens * width))))]
    norms = QKNorms(*(bench.normal(128) * 0.1 for _ in range(4)))
    table = rope_table(65536, site.rotary_dim, 5e6, bench.device)
    positions = torch.randint(0, 65536, (tokens,), device=bench.device)
    slots = torch.randperm(pages_of(bench) * 128, device=bench.device)[:tokens]
    caches = empty(bench, main, heads, True), empty(bench, index, 1, False)
    ours = bench.poison(tokens, q_heads, 128), bench.poison(tokens, heads, 128)
    given = (norms, positions, table, *caches, slots, slots)
    calls: Calls = {"m3hal": bench.calls("qk_norm_rope_insert", site, [(row, *given) for row in rows], ours)}
    absent = ""
    for name, (theirs, keys) in THEIRS.items():
        if bench.peer is None or theirs not in ("bfloat16", main):
            continue
        targets = empty(bench, theirs, heads, True), empty(bench, keys, 1, False)
        chosen = torch.float8_e4m3fn if keys == "fp8_e4m3" else torch.bfloat16  # of index_q
        out = bench.poison(tokens, q_heads, 128), torch.empty(tokens, heads, 128, dtype=chosen, device=bench.device)
        copies = [row.clone() for row in rows]
        found = bench.peer.insert(site, copies, norms, positions, table, targets, slots, out)
        calls |= {"vllm" if (theirs, keys) == (main, index) else name: found} if found else {}
        absent = "" if found else "vllm's compiled operators are not loaded"

    def check() -> float:
        """After the first row, which the first call wrote."""
        copies = [replace(c, buf=torch.zeros_like(c.buf)) for c in caches]
        wide = QKNorms(*(part.float() for part in (norms.q, norms.k, norms.index_q, norms.index_k) if part is not None))
        exact = bench.exact("qk_norm_rope_insert", site, rows[0].float(), wide, positions, table, *copies, slots, slots)
        mine, wanted = numbers(*caches), numbers(*copies)
        share = float((mine != wanted).sum() / (wanted != 0).sum())
        if share > DIFFER:
            raise Wrong(f"{share:.2%} of the caches' numbers differ from the definition's")
        return max(relative(o, e) for o, e in zip(ours, exact, strict=True))

    stored = tokens * sum(cache.layout.bytes_per_token() for cache in caches)
    floor = Floor(read=2 * tokens * width, written=256 * tokens * (q_heads + heads) + stored)
    return Work(calls, floor, {"m3hal": check}, absent=absent)


def pages_of(bench: Bench) -> int:
    return 4 if bench.small else 512


def empty(bench: Bench, format: str, heads: int, values: bool) -> PagedCache:
    """A cache of zeros, with global scales where the format has them."""
    layout = KVLayout(CACHE_FORMATS[format][0], format, 128, heads, 128, values)
    made = layout.empty(pages_of(bench), bench.device)
    made.buf.view(torch.uint8).zero_()
    if values and format in ("fp8_e4m3", "nvfp4"):
        return PagedCache(made.buf, layout, *(torch.tensor(scale, device=bench.device) for scale in (0.01, 0.02)))
    return made


def numbers(*caches: PagedCache) -> torch.Tensor:
    """All that they hold, fp32 [n, 128]."""
    read = ops.load("kv_read").reference
    parts = [part for c in caches for part in read(c, torch.arange(c.buf.shape[0] * 128, device=c.buf.device))]
    return torch.cat([part.flatten(0, 1) for part in parts if part is not None])
