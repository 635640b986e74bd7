"""Partial RoPE by itself; nobody else's is measured, as theirs are fused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from m3hal.ops.rope_partial import rope_table
from m3hal_conformance.bench import Bench, Floor, Row, Work
from m3hal_conformance.bench.bench import relative
from m3hal_conformance.bench.rows.rms_norm import TOKENS

ABSENT = "vllm rotates in its fused insertion (qk_norm_rope_insert), which is timed there"


def rows(small: bool) -> Iterator[Row]:
    for tokens in (5,) if small else TOKENS:
        yield Row("rope_partial", f"{tokens} x 64 heads", partial(_rotate, tokens))


def _rotate(tokens: int, bench: Bench) -> Work:
    site = bench.site("sparse_attention")
    size = 2 * tokens * site.num_q_heads * site.head_dim
    shape = (tokens, site.num_q_heads, site.head_dim)
    xs, out = [bench.normal(*shape) for _ in range(bench.rotations(size))], bench.poison(*shape)
    table = rope_table(65536, site.rotary_dim, 5e6, bench.device)
    positions = torch.randint(0, 65536, (tokens,), device=bench.device)
    calls = bench.calls("rope_partial", site, [(x, positions, table) for x in xs], out)
    check = lambda: relative(out, bench.exact("rope_partial", site, xs[0].double(), positions, table.double()))  # noqa: E731
    return Work({"m3hal": calls}, Floor(read=size, written=size), {"m3hal": check}, absent=ABSENT)
