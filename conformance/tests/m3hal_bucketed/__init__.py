"""A backend for a device that compiles one graph per shape: it refuses every shape that it did not declare."""

from __future__ import annotations

from itertools import product
from typing import Any

from m3hal import ops
from m3hal.dispatch import Impl, Manifest, one_of
from m3hal.reference import bind_definition
from m3hal.shape import Site

TOKENS, REQUESTS, PAGES, CONTEXT = (48, 129), (8,), (48, 96), (4096,)
#: (operator, tokens, requests, pages) of every graph that was "compiled"
COMPILED: set[tuple[Any, ...]] = set()

MANIFEST = Manifest(
    name="bucketed",
    vendor="m3hal tests",
    api=">=1,<2",
    devices=("cpu",),
    operators={
        "sparse_attention": (
            Impl(
                "m3hal_bucketed:sparse_attention",
                limits=(one_of("num_q_heads", 32), one_of("page_size", 128), one_of("dtype", "bfloat16")),
                layouts=("hnd",),
                memory="self",
                views="contiguous",
                zero_tokens=False,
                buckets={"tokens": TOKENS, "requests": REQUESTS, "pages": PAGES, "context": CONTEXT},
            ),
        ),
        "route_topk": (
            Impl(
                "m3hal_bucketed:route_topk",
                limits=(one_of("num_experts", 128), one_of("top_k_experts", 4)),
                memory="self",
                views="contiguous",
                zero_tokens=False,
                buckets={"tokens": TOKENS},
            ),
        ),
    },
)


def sparse_attention(site: Site) -> Any:
    right = bind_definition(ops.load("sparse_attention"), site)

    def run(q: Any, kv: Any, ids: Any, meta: Any, out: Any = None) -> Any:
        assert all(tensor.is_contiguous() for tensor in (q, kv.buf, ids))
        assert (len(q), len(meta.seq_lens), len(kv.buf), meta.max_k) in product(TOKENS, REQUESTS, PAGES, CONTEXT)
        COMPILED.add(("sparse_attention", q.shape, kv.buf.shape, meta.seq_lens.shape, meta.block_table.shape))
        return right(q, kv, ids, meta, out=out)

    return run


def route_topk(site: Site) -> Any:
    right = bind_definition(ops.load("route_topk"), site)

    def run(logits: Any, bias: Any, out: Any = None) -> Any:
        assert logits.is_contiguous()
        assert len(logits) in TOKENS
        COMPILED.add(("route_topk", logits.shape))
        return right(logits, bias, out=out)

    return run
