"""A paged cache that vLLM allocates and an operator of the plan reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, MLAAttentionSpec, SparseCacheRole

from m3hal.formats import PLAIN_FORMATS
from m3hal.layouts import KVLayout, PagedCache
from m3hal.vllm.metadata import BatchBuilder
from m3hal.vllm.support import index_format, kv_format

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
        return (KVCacheLayout.LBHNC,)  # a page is contiguous, and of [heads, tokens, width]: m3hal's hnd


def backend_name(layout: str, vllm_config: Any) -> str:
    """Tells how all caches of a model lie: engines that exchange pages compare it in their handshake.

    layout: the plan's, which together with the formats decides every cache's page map.
    """
    return f"M3HAL:{layout}:{kv_format(vllm_config)}:{index_format(vllm_config)}"


@cache
def _backend(name: str) -> type[AttentionBackend]:
    return type(name, (M3HalCacheBackend,), {"get_name": staticmethod(lambda: name)})


class CacheLayer(nn.Module, AttentionLayerBase):
    """One cache of one attention layer, known to vLLM by ``name``.

    layout: of a page. With values it is an ordinary KV cache; without, the indexer's keys. All caches of the model land
    in one group of vLLM's allocator and share a block table, so prefix caching covers them alike.
    reader: the operator that reads it; its ``plan_batch`` runs when vLLM builds this cache's metadata.
    backend: what vLLM calls it, see :func:`backend_name`.
    cache: the pages, once vLLM has allocated them. k_scale, v_scale: parameters of a quantised cache with values.
    """

    def __init__(self, name: str, layout: KVLayout, reader: Bound, vllm_config: Any, backend: str) -> None:
        super().__init__()
        self._backend = _backend(backend)
        self.name, self.layout, self.reader = name, layout, reader
        self.kv_cache = torch.tensor([])
        self.cache: PagedCache | None = None
        self.has_scales = layout.has_values and layout.format not in PLAIN_FORMATS
        if self.has_scales:  # 1 unless the checkpoint says otherwise; dequantisation multipliers
            self.k_scale = nn.Parameter(torch.ones((), dtype=torch.float32), requires_grad=False)
            self.v_scale = nn.Parameter(torch.ones((), dtype=torch.float32), requires_grad=False)
        known = vllm_config.compilation_config.static_forward_context
        if name in known:
            raise ValueError(f"vLLM already knows a layer named {name}")
        known[name] = self

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """kv_cache: [pages, slots, page_size, bytes or elements of a slot's token]; pages may lie apart."""
        self.kv_cache = kv_cache
        scales = (self.k_scale, self.v_scale) if self.has_scales else (None, None)
        pages = kv_cache.view(len(kv_cache), -1) if self.layout.kind == "planar" else kv_cache
        self.cache = PagedCache(pages, self.layout, *scales)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        layout, slots = self.layout, self.layout.heads
        if layout.kind != "hnd":  # pages of bytes: a slot for each head's keys, and one for its values
            slots *= layout.parts
        common = {
            "block_size": layout.page_size,
            "num_kv_heads": layout.heads,
            "head_size": layout.dim,
            "dtype": layout.dtype,
            "num_head_slots": slots,
            "state_content_bytes": layout.bytes_per_token() // slots,
        }
        if layout.has_values:
            return FullAttentionSpec(**common, head_size_v=layout.dim)
        return MLAAttentionSpec(**common, cache_role=SparseCacheRole.INDEXER)


@contextmanager
def moving(caches: tuple[CacheLayer, ...], batches: Mapping[str, Any]) -> Iterator[None]:
    """Around what a layer does with its caches, where a connector brings pages in and takes them out."""
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    if connector is None or not connector.has_connector_metadata():
        yield
        return
    for layer in caches:
        connector.wait_for_layer_load(layer.name)
    yield
    for layer in caches:
        connector.save_kv_layer(layer.name, layer.kv_cache, batches[layer.name])
