"""A whole attention layer's choice and attention: beside dense attention in a prefill, and in host time in a decode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from m3hal_conformance.bench import Bench, Call, Calls, Floor, Row, Work, clock
from m3hal_conformance.bench.rows import FORMATS, RANKS, kilo
from m3hal_conformance.bench.rows.select_blocks import chained, missed
from m3hal_conformance.bench.rows.sparse_attention import off

NEEDS = ("select_blocks", "sparse_attention")
#: (format of both caches, ranks, requests)
HOST = (("bfloat16", 1, 1), ("bfloat16", 1, 64), ("fp8_e4m3", 1, 8), ("bfloat16", 4, 8))


def rows(small: bool) -> Iterator[Row]:
    for ranks in RANKS:
        tokens = 256 if small else 8192
        yield Row("msa", f"prefill bf16 TP{ranks} {tokens} @ {kilo(tokens)}", partial(_prefill, ranks, tokens), NEEDS)
    for format, ranks, requests in HOST:
        case = f"host time decode {FORMATS[format]} TP{ranks} B{requests}"
        yield Row("msa", case, partial(_host, format, ranks, requests), NEEDS)


def _prefill(ranks: int, tokens: int, bench: Bench) -> Work:
    """The first chunk of a prompt, where dense attention reads no cache; its keys and values lie side by side."""
    site = bench.site(tensor_parallel=ranks)
    groups, pages = site.num_kv_heads, 40 if bench.small else 1024
    (meta,) = bench.batches(pages, 1, tokens, tokens)
    index_q, q = (bench.normal(tokens, n, 128) for n in (site.num_index_heads, site.num_q_heads))
    keys, kv = bench.cache("bfloat16", pages, 1, False), bench.cache("bfloat16", pages, groups, True)
    ids, out = bench.poison(tokens, groups, site.top_k_blocks, dtype=torch.int32), bench.poison(*q.shape)
    (select,) = bench.calls("select_blocks", site, [(index_q, keys, meta)], ids)
    (attend,) = bench.calls("sparse_attention", site, [(q, kv, ids, meta)], out)
    k, v = (bench.normal(1, site.num_q_heads, tokens, 128) for _ in range(2))
    turned = q.transpose(0, 1)[None].contiguous()
    dense = partial(torch.nn.functional.scaled_dot_product_attention, turned, k, v, is_causal=True, scale=site.scale)
    calls: Calls = {"dense cuDNN" if q.is_cuda else "dense": [_dense(dense, q.is_cuda)]}
    calls["m3hal"] = [_both(select, attend)]
    if bench.peer:
        theirs, other = bench.poison(groups, tokens, 16, dtype=torch.int32).transpose(0, 1), torch.empty_like(q)
        before = torch.zeros(1, dtype=torch.int32, device=bench.device)
        score = bench.peer.scores(site, index_q, keys, meta, before)["vllm"]
        choose = partial(bench.peer.topk, site, meta=meta, before=before, out=theirs)
        calls["vllm"] = [
            _both(partial(chained, score, choose), bench.peer.sparse_prefill(site, q, kv, theirs, meta, before, other))
        ]

    def check() -> float:
        return max(missed(bench, site, ids, index_q, keys, meta) / 5, off(bench, site, out, q, kv, ids, meta))

    flops = 4.0 * site.num_q_heads * 128 * tokens * min(tokens, site.top_k_blocks * site.block_size)
    return Work(calls, Floor(flops=flops), {"m3hal": check}, timing="single")


def _dense(dense: Call, cudnn: bool) -> Call:
    def run() -> object:
        if not cudnn:
            return dense()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return dense()

    return run


def _both(first: Call, second: Call) -> Call:
    def run() -> None:
        first()
        second()

    return run


def _host(format: str, ranks: int, requests: int, bench: Bench) -> Work:
    """Until the host has enqueued choice and attention of one token a request."""
    site = bench.site(tensor_parallel=ranks, format=format)
    context, pages = (2560, 40) if bench.small else (65536, 2048)
    (meta,) = bench.batches(pages, requests, 1, context)
    index_q, q = (bench.normal(requests, n, 128) for n in (site.num_index_heads, site.num_q_heads))
    keys, kv = bench.cache(format, pages, 1, False), bench.cache(format, pages, site.num_kv_heads, True)
    ids, out = bench.poison(requests, site.num_kv_heads, 16, dtype=torch.int32), bench.poison(*q.shape)
    (select,) = bench.calls("select_blocks", site, [(index_q, keys, meta)], ids)
    (attend,) = bench.calls("sparse_attention", site, [(q, kv, ids, meta)], out)
    calls: Calls = {"m3hal": [_both(select, attend)]}
    if bench.peer:
        theirs, other = bench.poison(*ids.shape, dtype=torch.int32), torch.empty_like(q)
        theirs = theirs.transpose(0, 1).contiguous().transpose(0, 1)  # heads first, which both of its steps take
        (choose,) = bench.peer.index_decode(site, [index_q], keys, [meta], theirs)
        calls["vllm"] = [_both(choose, bench.peer.sparse_decode(site, [q], kv, [theirs], [meta], other)[0])]
    facts = {f"launches {name}": clock.launches(several[0]) for name, several in calls.items()} if q.is_cuda else {}
    check = partial(off, bench, site, out, q, kv, ids, meta)
    return Work(calls, None, {"m3hal": check}, timing="host", facts=facts)
