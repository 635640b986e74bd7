"""Compiles attention and the indexer for every format, block size and page size, and for sites far from MiniMax-M3's:
run by test_compiled_sizes.py.

    python compile_sizes.py TARGET     a line per kernel that does not compile or fit, and how many do

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

from m3hal.layouts import KVLayout, PagedCache, page_map

#: (operator, cache format, block size, page size, requests, query tokens)
Case = tuple[str, str, int, int, int, int]
#: attributes of a site and their values
Variant = tuple[tuple[str, object], ...]

SIZES = (16, 32, 64, 128)
FORMATS = ("bfloat16", "fp8_e4m3", "nvfp4")
#: (requests, query tokens of each): decode in parts and whole, verify, prefill
PHASES = ((1, 1), (64, 1), (64, 4), (1, 2048))
#: other sites of attention: (query heads, kv heads, head_dim, selected blocks, block and page size)
SITES = (
    (64, 4, 256, 16, 128, 128),
    (64, 4, 64, 16, 128, 128),
    (64, 4, 32, 16, 128, 16),
    (6, 2, 128, 16, 128, 128),
    (4, 4, 128, 16, 128, 128),
    (256, 1, 128, 16, 128, 128),
    (64, 1, 256, 16, 128, 128),
    (64, 4, 128, 64, 128, 128),
    (64, 4, 128, 1, 128, 128),
    (64, 4, 128, 16, 96, 96),
    (64, 4, 128, 16, 512, 512),
)
#: other sites of the indexer: (index heads, index_dim, selected blocks, block and page size)
INDEXERS = ((4, 64, 16, 128, 128), (3, 32, 16, 128, 16), (16, 128, 64, 128, 128), (4, 128, 16, 96, 48))
#: bytes of shared memory that a program may have, by target
SHARED = {"sm_90": 232448, "sm_100": 232448, "sm_103": 232448, "gfx950": 163840}


def odd_cases() -> Iterator[tuple[Case, Variant]]:
    """Sites that the limits admit and MiniMax-M3 has not, then activations in fp32."""
    for (heads, groups, dim, k, block, page), format, phase in itertools.product(SITES, FORMATS, PHASES[1:]):
        other = (("num_q_heads", heads), ("num_kv_heads", groups), ("head_dim", dim), ("top_k_blocks", k))
        yield ("sparse_attention", format, block, page, *phase), other
        if phase != (64, 4):
            yield ("paged_attention", format, 128, page, *phase), other[:3]
    for (heads, dim, k, block, page), format, phase in itertools.product(INDEXERS, (*FORMATS, "mxfp4"), PHASES[1:]):
        other = (("num_index_heads", heads), ("index_dim", dim), ("top_k_blocks", k))
        yield ("select_blocks", format, block, page, *phase), other
    for format, dim, phase in itertools.product(("float32", *FORMATS), (128, 256), PHASES[1:]):
        narrow = (("dtype", "float32"), ("head_dim", dim))
        yield ("sparse_attention", format, 128, 128, *phase), narrow
        yield ("paged_attention", format, 128, 128, *phase), narrow
        yield ("select_blocks", format, 128, 128, *phase), narrow[:1]


def cases() -> Iterator[Case]:
    """Of MiniMax-M3 with other blocks and pages."""
    for operator, formats in (("sparse_attention", FORMATS), ("select_blocks", (*FORMATS, "mxfp4"))):
        for format, block, page, phase in itertools.product(formats, SIZES, SIZES, PHASES):
            yield operator, format, block, page, *phase
    for format, page, phase in itertools.product(FORMATS, SIZES, PHASES):
        yield "paged_attention", format, 128, page, *phase


def call(case: Case, other: Variant) -> None:
    """One call at a site of MiniMax-M3 where some attributes are others."""
    from m3hal_triton.paged_attention import paged_attention
    from m3hal_triton.select_blocks import select_blocks
    from m3hal_triton.sparse_attention import sparse_attention

    operator, format, block, page, requests, q_len = case
    kind = "dense_attention" if operator == "paged_attention" else "sparse_attention"
    site = machine_cases.site(kind, "bfloat16", None if format == "bfloat16" else format)
    site = replace(
        site, block_size=block, page_size=page, **{"kv_format": format, "index_format": format} | dict(other)
    )
    chooses = operator == "select_blocks"
    heads, groups, dim = site.num_q_heads, site.num_kv_heads, site.head_dim
    if chooses:
        heads, groups, dim = site.num_index_heads, 1, site.index_dim
    if dim != 128 or site.dtype != "bfloat16":  # what a GPU would answer; all else here is of these
        for module in machine_code.MODULES:
            if "native" in vars(module):
                module.native = lambda *given: False
    made = {f.__name__: f for f in (paged_attention, select_blocks, sparse_attention)}[operator](site)
    inputs = [torch.empty(requests * q_len, heads, dim, dtype=getattr(torch, site.dtype))]
    inputs += [_cache(KVLayout(page_map(format, "hnd"), format, page, groups, dim, not chooses))]
    if operator == "sparse_attention":
        inputs += [torch.empty(requests * q_len, groups, site.top_k_blocks, dtype=torch.int32)]
    room = machine_cases.scratch(made)
    plan = machine_cases.planned(made, machine_cases.batch(requests, q_len, -(-4096 // page) * page, page))
    made.run(*inputs, plan, **({} if room is None else {"workspace": room}))


def _cache(layout: KVLayout) -> PagedCache:
    """Four pages, with the global scales that the format has."""
    scaled = layout.has_values and layout.format in ("fp8_e4m3", "nvfp4")
    return PagedCache(layout.empty(4).buf, layout, *([torch.ones(()), torch.ones(())] if scaled else []))


def compiles(made: object, options: dict[str, object], target: str) -> bool:
    """Whether a kernel compiles and fits a multiprocessor, found out by a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            shared = triton.compile(made, target=machine_code.TARGETS[target], options=options).metadata.shared
            if shared > SHARED[target]:
                raise MemoryError(f"{shared} bytes of shared memory are more than {SHARED[target]}")
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def main(target: str) -> int:
    """Exits with 1 when a kernel does not compile."""
    known: dict[str, bool] = {}
    failed = 0
    for case, other in itertools.chain(((case, ()) for case in cases()), odd_cases()):
        name = " ".join(map(str, (*case, *(f"{key}={value}" for key, value in other))))
        machine_cases.CASES[name] = partial(call, case, other)
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
