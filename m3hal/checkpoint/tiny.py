"""A tiny MiniMax-M3 checkpoint: the published layout and tensor names, random weights, a tokenizer trained on the spot.

    python -m m3hal.checkpoint.tiny DIRECTORY [--dtype bfloat16] [--seed 1]

Small enough for a laptop's CPU, and yet every mechanism of the large model does something: contexts beyond 256 tokens
exceed ``top_k_blocks * block_size``, so block selection decides the output; norm weights and router biases are random,
so that a lost offset or bias shows; a vision tower is there to be skipped. Needs no network.

Source: tensor names and config keys of MiniMaxAI/MiniMax-M3 as transformers ``minimax_m3_vl`` maps them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m3hal._lazy import torch

_SPARSE_LAYERS = [0, 1, 1, 1]

#: ``text_config`` of the checkpoint. Head counts and widths let two ranks split it.
TEXT_CONFIG: Mapping[str, Any] = {
    "model_type": "minimax_m3_text",
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 128,
    "dense_intermediate_size": 512,
    "shared_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "use_gemma_norm": True,
    "attention_output_gate": False,
    "rope_theta": 5_000_000.0,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 2.0,
    "num_mtp_modules": 0,
    "moe_layer_freq": _SPARSE_LAYERS,
    "tie_word_embeddings": False,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 2,
        "sparse_block_size": 128,
        "sparse_disable_index_value": _SPARSE_LAYERS,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": _SPARSE_LAYERS,
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_VISION_CONFIG: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 56,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "img_token_compression_config": {"temporal_patch_size": 2, "spatial_merge_size": 2},
}
_PROJECTOR_HIDDEN = 64

#: what the tokenizer learns its merges from
SAMPLE_TEXT = """
A sparse attention layer does not look at every token of the past. It first asks a small indexer which blocks of the
past matter for this token, keeps the best blocks and its own, and attends to those alone. The router of a mixture of
experts does the same with experts: it scores all of them, keeps the best four, and adds what they say. Once upon a
time there was a model that nobody could run, because each machine had its own kernels and none of them agreed. Then
somebody wrote the operators down, one definition each, and asked every kernel whether it was that operator. The quick
brown fox jumps over the lazy dog. import torch, def forward(self, hidden_states), return self.proj(hidden_states).
In the beginning the tensors were without form; what is the capital of France, and why does the sun rise in the east?
"""


def write(directory: str | Path, *, dtype: str = "float32", seed: int = 0) -> Path:
    """Writes config, weights and tokenizer into ``directory`` (created if absent) and returns it.

    dtype: of all weights except the router's, which stay fp32 as published: "float32" or "bfloat16".
    """
    from safetensors.torch import save_file

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    _write_json(target / "config.json", config(dtype))
    _write_json(target / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _write_tokenizer(target)
    save_file(tensors(dtype=dtype, seed=seed), str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


def config(dtype: str = "float32") -> dict[str, Any]:
    """The checkpoint's ``config.json``: vision-language outside, the text model in ``text_config``, as published."""
    return {
        "model_type": "minimax_m3_vl",
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": {**TEXT_CONFIG, "dtype": dtype},
        "vision_config": dict(_VISION_CONFIG),
        "image_token_index": TEXT_CONFIG["vocab_size"] - 1,
        "video_token_index": TEXT_CONFIG["vocab_size"] - 2,
        "projector_hidden_size": _PROJECTOR_HIDDEN,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": dtype,
    }


def tensors(*, dtype: str = "float32", seed: int = 0) -> dict[str, torch.Tensor]:
    """Published tensor name -> random weight. Same seed, same weights (rounded to ``dtype``)."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, (shape, std) in {**_text_shapes(), **_vision_shapes()}.items():
        weight = torch.randn(shape, generator=generator) * std
        found[name] = weight if name.endswith(_KEPT_IN_FP32) else weight.to(getattr(torch, dtype))
    return found


_KEPT_IN_FP32 = ("block_sparse_moe.gate.weight", "e_score_correction_bias")
_Shapes = dict[str, tuple[tuple[int, ...], float]]


def _text_shapes() -> _Shapes:
    """Name -> (shape, standard deviation)."""
    c = TEXT_CONFIG
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    shapes: _Shapes = {
        "language_model.model.embed_tokens.weight": ((vocab, hidden), 1.0),
        "language_model.model.norm.weight": ((hidden,), 0.1),
        "language_model.lm_head.weight": _linear(vocab, hidden),
    }
    for layer, sparse in enumerate(_SPARSE_LAYERS):
        prefix = f"language_model.model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": ((hidden,), 0.1),
            prefix + "post_attention_layernorm.weight": ((hidden,), 0.1),
            **_attention_shapes(prefix + "self_attn.", bool(sparse)),
        }
        if sparse:
            shapes |= _moe_shapes(prefix + "block_sparse_moe.")
        else:
            shapes |= _mlp_shapes(prefix + "mlp.", c["dense_intermediate_size"])
    return shapes


def _attention_shapes(prefix: str, sparse: bool) -> _Shapes:
    c = TEXT_CONFIG
    hidden, dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    shapes = {
        prefix + "q_proj.weight": _linear(q, hidden),
        prefix + "k_proj.weight": _linear(kv, hidden),
        prefix + "v_proj.weight": _linear(kv, hidden),
        prefix + "o_proj.weight": _linear(hidden, q),
        prefix + "q_norm.weight": ((dim,), 0.3),
        prefix + "k_norm.weight": ((dim,), 0.3),
    }
    if sparse:
        indexer = c["sparse_attention_config"]
        index_dim = indexer["sparse_index_dim"]
        shapes |= {
            prefix + "index_q_proj.weight": _linear(indexer["sparse_num_index_heads"] * index_dim, hidden),
            prefix + "index_k_proj.weight": _linear(index_dim, hidden),
            prefix + "index_q_norm.weight": ((index_dim,), 0.3),
            prefix + "index_k_norm.weight": ((index_dim,), 0.3),
        }
    return shapes


def _moe_shapes(prefix: str) -> _Shapes:
    c = TEXT_CONFIG
    hidden, inter, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    shapes = {
        prefix + "gate.weight": _linear(experts, hidden),
        prefix + "e_score_correction_bias": ((experts,), 0.2),
        **_mlp_shapes(prefix + "shared_experts.", c["shared_intermediate_size"]),
    }
    for expert in range(experts):
        shapes[f"{prefix}experts.{expert}.w1.weight"] = _linear(inter, hidden)  # gate
        shapes[f"{prefix}experts.{expert}.w3.weight"] = _linear(inter, hidden)  # up
        shapes[f"{prefix}experts.{expert}.w2.weight"] = _linear(hidden, inter)  # down
    return shapes


def _mlp_shapes(prefix: str, inter: int) -> _Shapes:
    hidden = TEXT_CONFIG["hidden_size"]
    return {
        prefix + "gate_proj.weight": _linear(inter, hidden),
        prefix + "up_proj.weight": _linear(inter, hidden),
        prefix + "down_proj.weight": _linear(hidden, inter),
    }


def _vision_shapes() -> _Shapes:
    v, text_hidden = _VISION_CONFIG, TEXT_CONFIG["hidden_size"]
    hidden, patch = v["hidden_size"], v["patch_size"]
    tower = "vision_tower.vision_model."
    shapes: _Shapes = {
        tower + "embeddings.patch_embedding.weight": (
            (hidden, v["num_channels"], v["temporal_patch_size"], patch, patch),
            0.05,
        ),
        **_biased(tower + "pre_layrnorm", (hidden,)),
        **_biased("multi_modal_projector.linear_1", (_PROJECTOR_HIDDEN, hidden)),
        **_biased("multi_modal_projector.linear_2", (text_hidden, _PROJECTOR_HIDDEN)),
        **_biased("patch_merge_mlp.linear_1", (_PROJECTOR_HIDDEN, text_hidden * v["spatial_merge_size"] ** 2)),
        **_biased("patch_merge_mlp.linear_2", (text_hidden, _PROJECTOR_HIDDEN)),
    }
    for layer in range(v["num_hidden_layers"]):
        prefix = f"{tower}encoder.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _biased(f"{prefix}self_attn.{name}", (hidden, hidden))
        shapes |= _biased(prefix + "mlp.fc1", (v["intermediate_size"], hidden))
        shapes |= _biased(prefix + "mlp.fc2", (hidden, v["intermediate_size"]))
        shapes |= _biased(prefix + "layer_norm1", (hidden,)) | _biased(prefix + "layer_norm2", (hidden,))
    return shapes


def _linear(rows: int, columns: int) -> tuple[tuple[int, int], float]:
    """A matrix that keeps the scale of its input, a little amplified."""
    return (rows, columns), 1.25 * columns**-0.5


def _biased(prefix: str, shape: tuple[int, ...]) -> _Shapes:
    return {prefix + ".weight": (shape, 0.1), prefix + ".bias": ((shape[0],), 0.1)}


def _write_tokenizer(target: Path) -> None:
    """A byte-level BPE of exactly ``vocab_size`` entries; any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_CONFIG["vocab_size"],
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE_TEXT], trainer)
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": TEXT_CONFIG["max_position_embeddings"],
            "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
        },
    )


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """``python -m m3hal.checkpoint.tiny``."""
    parser = argparse.ArgumentParser(prog="python -m m3hal.checkpoint.tiny", description="Write a tiny MiniMax-M3.")
    parser.add_argument("directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print(write(args.directory, dtype=args.dtype, seed=args.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
