"""A paged cache that vLLM allocates and an operator of the plan reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, MLAAttentionSpec, SparseCacheRole

from m3hal.formats import plain_dtype
from m3hal.layouts import KVLayout, PagedCache
from m3hal.vllm.metadata import BatchBuilder

if TYPE_CHECKING:
    from m3hal.dispatch import Bound


class M3HalCacheBackend(AttentionBackend):
    """How vLLM treats the caches. It computes nothing: the attention layer calls the plan's operators itself."""

    @staticmethod
    def get_name() -> str:
        return "M3HAL"

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        return BatchBuilder

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError  # vLLM asks for context-parallel support only, and takes this as a no

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [128 if kv_cache_spec is None else kv_cache_spec.block_size]  # pages are never split

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (KVCacheLayout.LBHNC,)  # pages of [heads, tokens, width]: m3hal's hnd


class CacheLayer(nn.Module, AttentionLayerBase):
    """One cache of one attention layer, known to vLLM by ``name``.

    layout: of a page. With values it is an ordinary KV cache; without, the indexer's keys. All caches of the model land
    in one group of vLLM's allocator and share a block table, so prefix caching covers them alike.
    reader: the operator that reads it; its ``plan_batch`` runs when vLLM builds this cache's metadata.
    cache: the pages, once vLLM has allocated them.
    """

    def __init__(self, name: str, layout: KVLayout, reader: Bound, vllm_config: Any) -> None:
        super().__init__()
        self.name, self.layout, self.reader = name, layout, reader
        self.kv_cache = torch.tensor([])
        self.cache: PagedCache | None = None
        known = vllm_config.compilation_config.static_forward_context
        if name in known:
            raise ValueError(f"vLLM already knows a layer named {name}")
        known[name] = self

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """kv_cache: [pages, heads, page_size, width], any strides; keys first in the last axis, then values."""
        self.kv_cache = kv_cache
        self.cache = PagedCache(kv_cache, self.layout)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return M3HalCacheBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        common = {
            "block_size": self.layout.page_size,
            "num_kv_heads": self.layout.heads,
            "head_size": self.layout.dim,
            "dtype": plain_dtype(self.layout.format),
        }
        if self.layout.has_values:
            return FullAttentionSpec(**common, head_size_v=self.layout.dim)
        return MLAAttentionSpec(**common, cache_role=SparseCacheRole.INDEXER)
