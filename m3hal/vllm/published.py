"""The tensors of a published MiniMax-M3 text model: every name with its shape, as the config and the formats say.

Names are without ``language_model.``; ``weight_scale_inv`` of MXFP8 is called ``weight_scale``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from m3hal.formats import FORMATS
from m3hal.vllm.schemes import Schemes


@dataclass(frozen=True)
class Expected:
    """shape: whole, before ranks share it; () also stands for (1,). expert: which routed expert it belongs to."""

    shape: tuple[int, ...]
    optional: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class Matrix:
    """A linear module [rows, columns] that a checkpoint may quantise."""

    module: str
    rows: int
    columns: int
    expert: int | None = None


def tensors(text: Any, schemes: Schemes) -> Mapping[str, Expected]:
    """Of a config's ``text_config``, as vLLM holds it."""
    found = {name: Expected(shape) for name, shape in _plain(text)}
    for matrix in matrices(text):
        for leaf, shape in leaves(schemes.of(matrix.module), matrix.rows, matrix.columns).items():
            found[f"{matrix.module}.{leaf}"] = Expected(shape, leaf == "input_scale", matrix.expert)
    return found


def leaves(format: str, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
    """What a checkpoint holds of a matrix in a format; "" is the model's dtype."""
    if not format:
        return {"weight": (rows, columns)}
    kind = FORMATS[format]
    group = columns if kind.group < 0 else kind.group
    found: dict[str, tuple[int, ...]] = {
        "weight": (rows, columns * kind.bits // 8),
        "weight_scale": (rows, columns // group),
    }
    return {**found, "weight_scale_2": (), "input_scale": ()} if format == "nvfp4" else found


def matrices(text: Any) -> Iterator[Matrix]:
    """Projections, MLPs and experts, layer by layer."""
    for layer in range(text.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        yield from _attention(text, prefix + "self_attn.", is_sparse(text, layer))
        if not text.moe_layer_freq[layer]:
            yield from _mlp(prefix + "mlp.", text.dense_intermediate_size, text.hidden_size)
            continue
        moe = prefix + "block_sparse_moe."
        if text.n_shared_experts:
            width = text.intermediate_size * text.n_shared_experts
            yield from _mlp(moe + "shared_experts.", width, text.hidden_size)
        for expert in range(text.num_local_experts):
            yield Matrix(f"{moe}experts.{expert}.w1", text.intermediate_size, text.hidden_size, expert)
            yield Matrix(f"{moe}experts.{expert}.w2", text.hidden_size, text.intermediate_size, expert)
            yield Matrix(f"{moe}experts.{expert}.w3", text.intermediate_size, text.hidden_size, expert)


def is_sparse(text: Any, layer: int) -> bool:
    """Whether a layer's attention is MSA."""
    return bool(text.sparse_attention_config["sparse_attention_freq"][layer])


def _attention(text: Any, prefix: str, sparse: bool) -> Iterator[Matrix]:
    hidden, dim = text.hidden_size, text.head_dim
    q, kv = text.num_attention_heads * dim, text.num_key_value_heads * dim
    yield Matrix(prefix + "q_proj", q, hidden)
    yield Matrix(prefix + "k_proj", kv, hidden)
    yield Matrix(prefix + "v_proj", kv, hidden)
    yield Matrix(prefix + "o_proj", hidden, q)
    if sparse:
        indexer = text.sparse_attention_config
        index_dim = indexer["sparse_index_dim"]
        yield Matrix(prefix + "index_q_proj", indexer["sparse_num_index_heads"] * index_dim, hidden)
        yield Matrix(prefix + "index_k_proj", index_dim, hidden)


def _mlp(prefix: str, width: int, hidden: int) -> Iterator[Matrix]:
    yield Matrix(prefix + "gate_proj", width, hidden)
    yield Matrix(prefix + "up_proj", width, hidden)
    yield Matrix(prefix + "down_proj", hidden, width)


def _plain(text: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What no format quantises: embeddings, norms and routers."""
    hidden = text.hidden_size
    yield "model.embed_tokens.weight", (text.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (text.vocab_size, hidden)
    for layer in range(text.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", (hidden,)
        for norm in ("q_norm", "k_norm", *(("index_q_norm", "index_k_norm") if is_sparse(text, layer) else ())):
            yield f"{prefix}self_attn.{norm}.weight", (text.head_dim,)
        if text.moe_layer_freq[layer]:
            yield f"{prefix}block_sparse_moe.gate.weight", (text.num_local_experts, hidden)
            yield f"{prefix}block_sparse_moe.e_score_correction_bias", (text.num_local_experts,)
