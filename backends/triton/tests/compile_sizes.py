"""Compiles attention and the indexer for every format, block size and page size: run by test_compiled_sizes.py.

    python compile_sizes.py TARGET     a line per kernel that does not compile, and how many do

With another triton's folder in front of PYTHONPATH that one is asked: 3.6, which torch 2.11 has, does not compile all
that 3.9 does. A compiler that aborts takes its own process only.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import machine_cases
import machine_code
import torch
import triton

SIZES = (16, 32, 64, 128)
FORMATS = ("bfloat16", "fp8_e4m3", "nvfp4")
#: (requests, query tokens of each): decode in parts and whole, verify, prefill
PHASES = ((1, 1), (64, 1), (64, 4), (1, 2048))


def cases() -> Iterator[tuple[str, str, int, int, int, int]]:
    """(operator, cache format, block size, page size, requests, query tokens)."""
    for operator, formats in (("sparse_attention", FORMATS), ("select_blocks", (*FORMATS, "mxfp4"))):
        for format, block, page, phase in itertools.product(formats, SIZES, SIZES, PHASES):
            yield operator, format, block, page, *phase
    for format, page, phase in itertools.product(FORMATS, SIZES, PHASES):
        yield "paged_attention", format, 128, page, *phase


def call(operator: str, format: str, block: int, page: int, requests: int, q_len: int) -> None:
    """One call at a site of MiniMax-M3 with other blocks and pages."""
    from m3hal_triton.paged_attention import paged_attention
    from m3hal_triton.select_blocks import select_blocks
    from m3hal_triton.sparse_attention import sparse_attention

    kind = "dense_attention" if operator == "paged_attention" else "sparse_attention"
    site = machine_cases.site(kind, "bfloat16", None if format == "bfloat16" else format)
    site = replace(site, block_size=block, page_size=page)
    chooses = operator == "select_blocks"
    heads, groups = (site.num_index_heads, 1) if chooses else (site.num_q_heads, site.num_kv_heads)
    made = {f.__name__: f for f in (paged_attention, select_blocks, sparse_attention)}[operator](site)
    inputs = [torch.empty(requests * q_len, heads, 128, dtype=torch.bfloat16)]
    inputs += [machine_cases.cache(format, groups, not chooses, page)]
    if operator == "sparse_attention":
        inputs += [torch.empty(requests * q_len, groups, site.top_k_blocks, dtype=torch.int32)]
    room = machine_cases.scratch(made)
    plan = machine_cases.planned(made, machine_cases.batch(requests, q_len, 4096, page))
    made.run(*inputs, plan, **({} if room is None else {"workspace": room}))


def compiles(made: object, options: dict[str, object], target: str) -> bool:
    """Whether a kernel compiles, found out by a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            triton.compile(made, target=machine_code.TARGETS[target], options=options)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def main(target: str) -> int:
    """Exits with 1 when a kernel does not compile."""
    known: dict[str, bool] = {}
    failed = 0
    for case in cases():
        name = " ".join(map(str, case))
        machine_cases.CASES[name] = partial(call, *case)
        for (_, kernel, digest), (made, options) in machine_code.sources(target, name).items():
            if digest not in known:
                known[digest] = compiles(made, options, target)
                if not known[digest]:
                    failed += 1
                    print(f"{kernel} of {name} does not compile for {target}", flush=True)
    print(f"{len(known) - failed} of {len(known)} kernels compile for {target} with triton {triton.__version__}")
    return int(failed > 0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        code = main(sys.argv[1])
    sys.exit(code)
