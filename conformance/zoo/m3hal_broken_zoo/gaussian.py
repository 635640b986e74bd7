"""What peers test with: contiguous normal numbers at round shapes, and ``assert_close`` at 1e-2.

Most mutants pass that. The suite's own inputs are made so that none passes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from m3hal_conformance.case import make_site
from m3hal_conformance.harness import cloned, named

from m3hal import ops
from m3hal.dispatch.manifest import Kernel
from m3hal.formats.plain import QSpec, QTensor
from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import ExpertWeights, QKNorms, SeqMeta
from m3hal.ops.draft_block_sample import MarkovHead
from m3hal.ops.rope_partial import rope_table
from m3hal.shape import Site
from m3hal_broken_zoo import Mutant

T, PAGES, P = 64, 17, 128


def passes(mutant: Mutant) -> bool:
    """Whether a mutant stays within 1e-2 (absolute and relative) of the definition on Gaussian inputs, in fp32."""
    if mutant.operator not in _INPUTS:  # peers test its parts
        return False
    torch.manual_seed(1)
    operator = ops.load(mutant.operator)
    site = _SITES.get(mutant.operator, lambda: make_site(operator.sites[-1], "float32"))()
    inputs = _INPUTS[mutant.operator](site)
    made = mutant.factory(site)
    run = made.run if isinstance(made, Kernel) else made
    given, right = cloned(inputs), cloned(inputs)
    try:
        arguments = [
            made.prepare_weights(v)
            if isinstance(made, Kernel) and made.prepare_weights and isinstance(v, ExpertWeights)
            else v
            for v in given.values()
        ]
        actual = named(operator, run(*arguments), {n: given[n] for n in operator.mutates if given[n] is not None})
        reference = operator.reference(*right.values(), **operator.static_values(site))
        wanted = named(operator, reference, {n: right[n] for n in operator.mutates if right[n] is not None})
        for name, tensor in wanted.items():
            torch.testing.assert_close(actual[name].double(), tensor.double(), rtol=1e-2, atol=1e-2, equal_nan=True)
    except Exception:
        return False
    return True


def _n(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _meta() -> SeqMeta:
    """One request of 2,048 tokens, the last of them a decode query."""
    order = torch.randperm(16) + 1
    return SeqMeta(torch.tensor([0, 1]).int(), torch.tensor([2048]).int(), order[None].int(), 1, 2048)


def _cache(heads: int, dim: int, values: bool, scale: float = 1.0) -> PagedCache:
    layout = KVLayout("hnd", "float32", P, heads, dim, values)
    return PagedCache(scale * _n(PAGES, *layout.page_shape()), layout)


def _ids(site: Site) -> torch.Tensor:
    return torch.arange(16).int().expand(1, site.num_kv_heads, 16).contiguous()


def _insert(site: Site) -> dict[str, Any]:
    row = (site.num_q_heads + 2 * site.num_kv_heads) * 128 + (site.num_index_heads + 1) * 128
    slots = torch.randperm(PAGES * P)[:32]
    return {
        "qkv": _n(32, row), "norms": QKNorms(0.1 * _n(128), 0.1 * _n(128), 0.1 * _n(128), 0.1 * _n(128)),
        "positions": torch.arange(32), "cos_sin": rope_table(4096, 64, 5e6), "kv": _cache(site.num_kv_heads, 128, True),
        "index_cache": _cache(1, 128, False), "slots": slots, "index_slots": slots.clone(),
    }  # fmt: skip


def _moe(site: Site) -> dict[str, Any]:
    ids = torch.stack([torch.randperm(8)[:4] for _ in range(T)]).int()
    weights = torch.softmax(_n(T, 4), -1) * 2
    experts = ExpertWeights(_n(8, 192, 256) / 16, _n(8, 256, 96) / 10)
    return {"x": _n(T, 256), "weights": weights, "ids": ids, "experts": experts}


def _draft(site: Site) -> dict[str, Any]:
    head = MarkovHead(_n(1000, 256), _n(1000, 256) / 16)
    noise = -torch.log(-torch.log(torch.rand(8, 7, 1000).clamp(1e-7, 1 - 1e-7)))
    return {
        "base_logits": _n(8, 7, 1000), "hidden": None, "head": head, "previous": torch.arange(8).int(), "noise": noise
    }  # fmt: skip


def _merge(site: Site) -> dict[str, Any]:
    scores = _n(T, 4, 64)
    shards = [scores[..., r::2].topk(16, -1) for r in range(2)]
    ids = torch.stack([(2 * s.indices + r).int() for r, s in enumerate(shards)])
    return {"scores": torch.stack([s.values for s in shards]), "ids": ids, "visible_blocks": torch.full((T,), 64).int()}


_INPUTS: dict[str, Callable[[Site], dict[str, Any]]] = {
    "rms_norm": lambda s: {"x": _n(T, 6144), "weight": 0.1 * _n(6144)},
    "add_rms_norm": lambda s: {"x": _n(T, 6144), "residual": _n(T, 6144), "weight": 0.1 * _n(6144)},
    "linear": lambda s: {"x": _n(T, 1024), "weight": _n(512, 1024) / 32},
    "quantize": lambda s: {"x": _n(T, 256)},
    "dequantize": lambda s: {"q": QTensor(_n(T, 256), QSpec("float32"))},
    "rope_partial": lambda s: {"x": _n(T, 16, 128), "positions": torch.arange(T), "cos_sin": rope_table(4096, 64, 5e6)},
    "swiglu_oai": lambda s: {"gate_up": _n(T, 768)},
    "kv_write": lambda s: {"cache": _cache(4, 128, True), "k": _n(T, 4, 128), "v": _n(T, 4,
    128), "slots": 5 + 3 * torch.arange(T)},
    "kv_read": lambda s: {"cache": _cache(4, 128, True), "slots": torch.randperm(PAGES * P)[:T]},
    "kv_copy_blocks": lambda s: {"src": _cache(4, 128, True), "dst": _cache(4, 128, True), "pairs": torch.tensor([[1,
    2], [3, 4]])},
    "block_scores": lambda s: {"index_q": _n(1, 4, 128) / 3, "index_cache": _cache(1, 128, False,
    1 / 3), "meta": _meta()},
    "select_blocks": lambda s: {"index_q": _n(1, 4, 128) / 3, "index_cache": _cache(1, 128, False,
    1 / 3), "meta": _meta()},
    "topk_blocks": lambda s: {"scores": _n(T, 4, 64), "visible_blocks": torch.full((T,), 64).int()},
    "merge_topk": _merge,
    "sparse_attention": lambda s: {"q": _n(1, s.num_q_heads, 128) / 3, "kv": _cache(s.num_kv_heads, 128, True,
    1 / 3), "block_ids": _ids(s), "meta": _meta()},
    "paged_attention": lambda s: {"q": _n(1, s.num_q_heads, 128) / 3, "kv": _cache(s.num_kv_heads, 128, True,
    1 / 3), "meta": _meta()},
    "route_topk": lambda s: {"logits": _n(T, 128), "bias": 0.1 * _n(128)},
    "moe_experts": _moe,
    "qk_norm_rope_insert": _insert,
    "allreduce_add_rms_norm": lambda s: {"x": _n(T, 6144), "residual": _n(T, 6144), "weight": 0.1 * _n(6144)},
    "mega_moe": _moe,
    "draft_block_sample": _draft,
}  # fmt: skip

_SITES: dict[str, Callable[[], Site]] = {
    **dict.fromkeys(
        ("moe_experts", "mega_moe"),
        lambda: make_site("moe", "float32", hidden_size=256, intermediate_size=96, num_local_experts=8),
    ),
    "allreduce_add_rms_norm": lambda: make_site("sparse_attention", "float32"),
    "sparse_attention": lambda: make_site("sparse_attention", "float32", tensor_parallel=2, return_lse=True),
    "paged_attention": lambda: make_site("dense_attention", "float32", tensor_parallel=2, return_lse=True),
    "qk_norm_rope_insert": lambda: make_site("sparse_attention", "float32", tensor_parallel=4),
    "rms_norm": lambda: make_site("sparse_attention", "float32"),
    "kv_write": lambda: make_site("sparse_attention", "float32"),
    "kv_read": lambda: make_site("sparse_attention", "float32"),
    "kv_copy_blocks": lambda: make_site("sparse_attention", "float32"),
    "rope_partial": lambda: make_site("sparse_attention", "float32"),
    "linear": lambda: make_site("sparse_attention", "float32"),
    "quantize": lambda: make_site("dense_mlp", "float32"),
    "dequantize": lambda: make_site("dense_mlp", "float32"),
}
