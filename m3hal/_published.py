"""Checkpoints' configurations in one spelling: that of the published ``config.json``.

transformers flattens ``sparse_attention_config`` and lists layer types by name when it writes a configuration; both
spellings mean the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: published key of ``sparse_attention_config`` -> the key that transformers writes beside the others
_FLATTENED = {
    "sparse_index_dim": "index_head_dim",
    "sparse_num_index_heads": "index_n_heads",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}


def as_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration; keys that are already published stay as they are."""
    text = dict(config.get("text_config") or config)
    if "sparse_attention_config" not in text and "index_block_size" in text:
        sparse = {name: text[key] for name, key in _FLATTENED.items() if key in text}
        types = text.get("layer_types") or []
        # transformers has no initial blocks: its indexer forces local ones only.
        text["sparse_attention_config"] = sparse | {
            "sparse_init_block": 0,
            "sparse_attention_freq": [int(kind == "minimax_m3_sparse") for kind in types],
        }
        # Its model has no other norm than Gemma's.
        text.setdefault("use_gemma_norm", True)
    if "moe_layer_freq" not in text and "mlp_layer_types" in text:
        text["moe_layer_freq"] = [int(kind == "sparse") for kind in text["mlp_layer_types"]]
    if "n_shared_experts" not in text and "shared_intermediate_size" in text:
        text["n_shared_experts"] = text["shared_intermediate_size"] // text["intermediate_size"]
    if "partial_rotary_factor" not in text and "rotary_dim" in text:
        text["partial_rotary_factor"] = text["rotary_dim"] / text["head_dim"]
    if "rope_theta" not in text and "rope_theta" in (text.get("rope_parameters") or {}):
        text["rope_theta"] = text["rope_parameters"]["rope_theta"]
    return text
