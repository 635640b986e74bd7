"""One forward's batch: from vLLM's metadata to ``SeqMeta``, planned once per operator and shared by the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from m3hal.ops import SeqMeta


@dataclass(frozen=True)
class Batch(AttentionMetadata):
    """What the layers over one group of caches need in one forward.

    tokens: rows of the forward that hold tokens; the rest is padding. slots: int64 [tokens], where each token goes in
    the cache; -1: nowhere. meta: operator -> what its ``run`` takes as ``meta``: the SeqMeta, or what its
    ``plan_batch`` made of it.
    """

    tokens: int
    slots: torch.Tensor
    meta: Mapping[str, Any]


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """vLLM makes one per group of caches with the same spec, and calls :meth:`build` once per forward."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        caches = vllm_config.compilation_config.static_forward_context
        self._readers = {bound.operator: bound for bound in (caches[name].reader for name in layer_names)}
        self._storage = {
            name: torch.empty(bound.plan_bytes, dtype=torch.uint8, device=device)
            for name, bound in self._readers.items()
            if bound.plan_bytes
        }

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Batch:
        common = common_attn_metadata
        requests = common.num_reqs
        meta = SeqMeta(
            cu_q=common.query_start_loc[: requests + 1],
            seq_lens=common.seq_lens[:requests],
            block_table=common.block_table_tensor[:requests],
            max_q=common.max_query_len,
            max_k=common.max_seq_len,
        )
        planned = {
            name: bound.plan_batch(meta, self._storage.get(name)) if bound.plan_batch else meta
            for name, bound in self._readers.items()
        }
        tokens = common.num_actual_tokens
        return Batch(tokens=tokens, slots=common.slot_mapping[:tokens], meta=planned)
