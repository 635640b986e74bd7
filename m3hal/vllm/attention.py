"""An attention layer of MiniMax-M3 in vLLM: vLLM's projections and caches, the plan's operators in between.

    hidden --qkv_proj--> [q | k | v | index_q | index_k]        one row per token; the index part on sparse layers only
      qk_norm_rope_insert   norms and rotates the heads, writes k, v and index_k into this layer's two paged caches
      select_blocks         index_q against the index cache: the blocks of keys that each token may see
      sparse_attention      q against the chosen blocks of the KV cache        (dense layers: paged_attention, all keys)
    --o_proj--> hidden

To ``torch.compile`` everything between the projections is one opaque operator, ``torch.ops.m3hal.attention``, that
finds its layer by name: caches and batch metadata reach a layer through vLLM's forward context, not as arguments.

``operators`` are the plan's implementations for this kind of layer: ``run(name)`` is the callable, to which scale,
block size and the other static values were bound when the model was built; ``bound[name]`` also knows how the
implementation plans a batch. Each cache names the operator that reads it, because that operator plans the batch over
it, once per forward for all layers: ``batch.meta[name]`` is what it takes then.

No CUDA graph of vLLM's holds this part, as none holds vLLM's own MSA: a captured attention would keep the batch that it
was captured with. Where vLLM breaks captures, the operator is a break; where it splits compiled graphs, it splits here
(:func:`m3hal.vllm.config.keep_out_of_graphs`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import (
    MinimaxM3QKVParallelLinearWithIndexer,
    QKVParallelLinear,
    RowParallelLinear,
)

from m3hal.layouts import KVLayout, page_map
from m3hal.ops import QKNorms
from m3hal.shape import Site
from m3hal.vllm import opaque
from m3hal.vllm.cache import CacheLayer, backend_name, moving
from m3hal.vllm.operators import SiteOperators


class M3Attention(nn.Module):
    """Dense or sparse, as its operators' site says. Head counts in the site are this rank's."""

    def __init__(self, operators: SiteOperators, cos_sin: torch.Tensor, vllm_config: Any, prefix: str) -> None:
        """cos_sin: fp32 [max_context, rotary_dim], shared by all layers. prefix: e.g. ``model.layers.3.self_attn``."""
        super().__init__()
        site = operators.site
        self.site, self.name, self.cos_sin = site, f"{prefix}.core", cos_sin
        self.is_sparse = site.kind == "sparse_attention"

        self.qkv_proj, self.o_proj = _projections(site, vllm_config, prefix)
        operators.serve(self.qkv_proj, f"{prefix}.qkv_proj")
        operators.serve(self.o_proj, f"{prefix}.o_proj")
        self.q_norm, self.k_norm = HeadNorm(site.head_dim), HeadNorm(site.head_dim)
        self.norms = QKNorms(self.q_norm.weight, self.k_norm.weight)
        self.insert = operators.run("qk_norm_rope_insert", prefix)

        reader = "sparse_attention" if self.is_sparse else "paged_attention"
        kind = page_map(site.kv_format, operators.layout)
        pages = KVLayout(kind, site.kv_format, site.page_size, site.num_kv_heads, site.head_dim, has_values=True)
        backend = backend_name(operators.layout, vllm_config)
        self.kv = CacheLayer(f"{prefix}.attn", pages, operators.bound[reader], vllm_config, backend)
        self.attend = operators.run(reader, prefix)

        if self.is_sparse:
            self.index_q_norm, self.index_k_norm = HeadNorm(site.index_dim), HeadNorm(site.index_dim)
            self.norms = replace(self.norms, index_q=self.index_q_norm.weight, index_k=self.index_k_norm.weight)
            kind = page_map(site.index_format, operators.layout)
            index_pages = KVLayout(kind, site.index_format, site.page_size, 1, site.index_dim, has_values=False)
            self.index = CacheLayer(
                f"{prefix}.attn.index_cache", index_pages, operators.bound["select_blocks"], vllm_config, backend
            )
            self.select = operators.run("select_blocks", prefix)

        self.core = eager_break_during_capture(self._core)
        self.caches = (self.kv, self.index) if self.is_sparse else (self.kv,)
        vllm_config.compilation_config.static_forward_context[self.name] = self  # where the opaque operator looks

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """positions int64 [T], hidden [T, H] -> [T, H], summed over the ranks."""
        qkv, _ = self.qkv_proj(hidden)
        out = torch.empty((len(qkv), self.site.num_q_heads * self.site.head_dim), dtype=qkv.dtype, device=qkv.device)
        torch.ops.m3hal.attention(qkv, positions, out, self.name)
        projected: torch.Tensor = self.o_proj(out)[0]
        return projected

    def _core(self, qkv: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """From projected rows to attended rows, in place in ``out`` [T, Hq * D]."""
        batches = get_forward_context().attn_metadata
        if not isinstance(batches, dict):  # vLLM measures memory before it has allocated caches
            out.zero_()
            return
        with moving(self.caches, batches):
            self._attend(batches, qkv, positions, out)

    def _attend(self, batches: Any, qkv: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        batch = batches[self.kv.name]
        tokens = batch.tokens
        out[tokens:].zero_()  # padding
        q_out = out[:tokens].view(tokens, self.site.num_q_heads, self.site.head_dim)
        rows = (qkv[:tokens], self.norms, positions[:tokens], self.cos_sin)
        if not self.is_sparse:
            q, _ = self.insert(*rows, self.kv.cache, None, batch.slots, None)
            self.attend(q, self.kv.cache, batch.meta["paged_attention"], out=q_out)
            return
        index_batch = batches[self.index.name]
        q, index_q = self.insert(*rows, self.kv.cache, self.index.cache, batch.slots, index_batch.slots)
        block_ids = self.select(index_q, self.index.cache, index_batch.meta["select_blocks"])
        self.attend(q, self.kv.cache, block_ids, batch.meta["sparse_attention"], out=q_out)


class HeadNorm(nn.Module):
    """Holds the weight of a norm that all heads of a kind share; ``qk_norm_rope_insert`` applies it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim), requires_grad=False)


def _projections(site: Site, vllm_config: Any, prefix: str) -> tuple[nn.Module, nn.Module]:
    """vLLM's tensor-parallel linears. They take the whole model's head counts and split or replicate by themselves."""
    config = vllm_config.model_config.hf_text_config
    q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    common = {"bias": False, "quant_config": vllm_config.quant_config}
    sizes = (site.hidden_size, site.head_dim, q_heads, kv_heads)
    name = f"{prefix}.qkv_proj"
    if site.kind == "sparse_attention":  # one index head per kv head, and one index key
        qkv = MinimaxM3QKVParallelLinearWithIndexer(*sizes, kv_heads, site.index_dim, **common, prefix=name)
    else:
        qkv = QKVParallelLinear(*sizes, **common, prefix=name)
    o = RowParallelLinear(q_heads * site.head_dim, site.hidden_size, **common, prefix=f"{prefix}.o_proj")
    return qkv, o


def _attention(qkv: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, layer: str) -> None:
    get_forward_context().no_compile_layers[layer].core(qkv, positions, out)


opaque.define(
    "attention(Tensor qkv, Tensor positions, Tensor(a!) out, str layer) -> ()",
    _attention,
    fake=lambda qkv, positions, out, layer: None,
)
