"""The operators of MiniMax-M3: one file each, loaded by name. Nothing here imports torch until a tensor is touched."""

from __future__ import annotations

import importlib
from functools import cache

from m3hal.ops._batch import ExpertLoRA, ExpertWeights, QKNorms, SeqMeta
from m3hal.ops._group import Group, ProcessGroup
from m3hal.ops._operator import Numeric, Operator, Trait

CORE = (
    "rms_norm",
    "add_rms_norm",
    "linear",
    "quantize",
    "dequantize",
    "rope_partial",
    "kv_write",
    "kv_read",
    "kv_copy_blocks",
    "block_scores",
    "topk_blocks",
    "merge_topk",
    "sparse_attention",
    "paged_attention",
    "route_topk",
    "swiglu_oai",
    "moe_experts",
)
#: in an order in which what one covers comes before it
FUSED = (
    "qk_norm_rope_insert",
    "qkv_norm_rope_insert",
    "select_blocks",
    "allreduce_add_rms_norm",
    "mega_moe",
    "draft_block_sample",
    "sparse_decoder_layer",
)
NAMES = CORE + FUSED


@cache
def load(name: str) -> Operator:
    """The definition of an operator. Raises KeyError for an unknown name."""
    if name not in NAMES:
        raise KeyError(name)
    operator: Operator = importlib.import_module(f"m3hal.ops.{name}").OPERATOR
    return operator


def covered(name: str) -> tuple[str, ...]:
    """The operators that a fused one covers, directly or through another fused one."""
    parts = load(name).covers
    return tuple(dict.fromkeys([*parts, *(deeper for part in parts for deeper in covered(part))]))


__all__ = [
    "CORE",
    "FUSED",
    "NAMES",
    "ExpertLoRA",
    "ExpertWeights",
    "Group",
    "Numeric",
    "Operator",
    "ProcessGroup",
    "QKNorms",
    "SeqMeta",
    "Trait",
    "covered",
    "load",
]
