"""Checkpoints with MiniMax-M3's tensor names and shapes and made-up weights, in every layout that m3hal reads.

    python -m m3hal.checkpoint.synthetic DIRECTORY --layers 5 --experts 8 [--layout quark|bf16|...] [--small]

Deterministic: a tensor's bytes depend on its name, its shape and the seed alone, so two layouts of one seed hold the
same numbers, and a checkpoint of fewer layers or experts holds a part of a larger one's. The experts are MXFP4 from
the start, hence exact in each layout.

Source: names and shapes of MiniMaxAI/MiniMax-M3 and amd/MiniMax-M3-MXFP4.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from m3hal.checkpoint.convert import PROFILES, convert
from m3hal.checkpoint.convert.container import Entry
from m3hal.checkpoint.convert.files import write_bytes, write_json
from m3hal.checkpoint.convert.quark import BLOCK
from m3hal.checkpoint.mxfp4 import Bytes, dequantize, quark_config
from m3hal.checkpoint.shards import write_shards
from m3hal.shape import MINIMAX_M3


@dataclass(frozen=True)
class Synthetic:
    """A model's size. The defaults of the widths are M3's own; dense: how many of the layers have no experts.

    shard_bytes: a shard is closed when it holds this much.
    """

    layers: int = 4
    dense: int = 1
    experts: int = 8
    hidden: int = MINIMAX_M3["hidden_size"]
    inter: int = MINIMAX_M3["intermediate_size"]
    dense_inter: int = MINIMAX_M3["dense_intermediate_size"]
    heads: int = MINIMAX_M3["num_attention_heads"]
    kv_heads: int = MINIMAX_M3["num_key_value_heads"]
    head_dim: int = MINIMAX_M3["head_dim"]
    vocab: int = MINIMAX_M3["vocab_size"]
    shard_bytes: int = 4 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a model that can't be."""
        if not 0 <= self.dense <= self.layers or self.layers < 1:
            raise ValueError(f"{self.dense} of {self.layers} layers without experts; give 1 or more, of which as many")
        if min(self.experts, self.vocab) < 1:
            raise ValueError(f"{self.experts} experts and {self.vocab} tokens; give 1 or more of each")

    def config(self, layout: str) -> dict[str, Any]:
        """``config.json``."""
        sparse = [0] * self.dense + [1] * (self.layers - self.dense)
        indexer = {**MINIMAX_M3["sparse_attention_config"], "sparse_attention_freq": sparse}
        text = {
            **MINIMAX_M3,
            "model_type": "minimax_m3_text",
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inter,
            "dense_intermediate_size": self.dense_inter,
            "shared_intermediate_size": self.inter,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_local_experts": self.experts,
            "moe_layer_freq": sparse,
            "sparse_attention_config": {**indexer, "sparse_num_index_heads": self.kv_heads},
        }
        outer = {
            "model_type": "minimax_m3_vl",
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "text_config": text,
            "dtype": "bfloat16",
        }
        return outer if layout == "bf16" else {**outer, "quantization_config": quark_config()}

    def dense_tensors(self) -> Iterator[Entry]:
        """What no layout quantises: name, dtype, shape."""
        prefix = "language_model."
        yield prefix + "lm_head.weight", "BF16", (self.vocab, self.hidden)
        yield prefix + "model.embed_tokens.weight", "BF16", (self.vocab, self.hidden)
        yield prefix + "model.norm.weight", "BF16", (self.hidden,)
        yield "multi_modal_projector.linear_1.weight", "BF16", (64, self.hidden)
        yield "vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias", "BF16", (64,)
        for layer in range(self.layers):
            yield from self._layer(f"{prefix}model.layers.{layer}.", layer >= self.dense)

    def _layer(self, prefix: str, sparse: bool) -> Iterator[Entry]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = {"q_proj": (q, self.hidden), "k_proj": (kv, self.hidden), "v_proj": (kv, self.hidden)}
        matrices |= {"o_proj": (self.hidden, q)}
        norms = {"q_norm": self.head_dim, "k_norm": self.head_dim}
        if sparse:
            index_dim = MINIMAX_M3["sparse_attention_config"]["sparse_index_dim"]
            matrices |= {"index_q_proj": (self.kv_heads * index_dim, self.hidden)}
            matrices |= {"index_k_proj": (index_dim, self.hidden)}
            norms |= {"index_q_norm": index_dim, "index_k_norm": index_dim}
            yield prefix + "block_sparse_moe.gate.weight", "F32", (self.experts, self.hidden)
            yield prefix + "block_sparse_moe.e_score_correction_bias", "F32", (self.experts,)
        else:
            for name, shape in _mlp(self.dense_inter, self.hidden).items():
                yield f"{prefix}mlp.{name}.weight", "BF16", shape
        for name, shape in matrices.items():
            yield f"{prefix}self_attn.{name}.weight", "BF16", shape
        for name, size in {**{"self_attn." + name: size for name, size in norms.items()}, **self._norms()}.items():
            yield f"{prefix}{name}.weight", "BF16", (size,)

    def _norms(self) -> dict[str, int]:
        return {"input_layernorm": self.hidden, "post_attention_layernorm": self.hidden}

    def expert_matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """What Quark quantises: module name, [N, K]; routed experts w1 (gate), w2 (down), w3 (up), and the shared."""
        for layer in range(self.dense, self.layers):
            prefix = f"language_model.model.layers.{layer}.block_sparse_moe."
            for name, shape in _mlp(self.inter, self.hidden).items():
                yield f"{prefix}shared_experts.{name}", shape
            for expert in range(self.experts):
                yield f"{prefix}experts.{expert}.w1", (self.inter, self.hidden)
                yield f"{prefix}experts.{expert}.w2", (self.hidden, self.inter)
                yield f"{prefix}experts.{expert}.w3", (self.inter, self.hidden)


LAYOUTS = ("quark", "bf16", *(f"fp8-{name}" for name in PROFILES))
#: of everything that is 6144, 3072, 12288 or 200064 wide in M3
_NARROW: Mapping[str, int] = {
    "hidden": 256,
    "inter": 128,
    "dense_inter": 256,
    "heads": 4,
    "kv_heads": 2,
    "vocab": 64,
    "shard_bytes": 1 << 20,
}


def write(directory: str | Path, model: Synthetic, *, layout: str = "quark") -> Path:
    """Writes config, index and shards into ``directory`` (created if absent) and returns it.

    layout: "quark" (MXFP4 codes and E8M0 scales), "bf16", or "fp8-gaudi2" and "fp8-hopper", which are made of "quark"
        by the converter, as every such checkpoint is.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; there are {', '.join(LAYOUTS)}")
    target = Path(directory)
    if layout.startswith("fp8-"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent) as place:
            source = write(Path(place) / "quark", model)
            return convert(source, target, PROFILES[layout.removeprefix("fp8-")]).target
    target.mkdir(parents=True, exist_ok=True)
    if any(target.glob("*.safetensors")):
        raise ValueError(f"{target} holds shards, which would be mixed with the new ones; name a new folder")
    entries = [*model.dense_tensors(), *_expert_entries(model, layout)]
    matrices = dict(model.expert_matrices())
    write_shards(target, sorted(entries), model.shard_bytes, lambda entry: _bytes_of(entry, matrices, model.seed))
    write_json(target / "config.json", model.config(layout))
    write_json(target / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    write_bytes(target / "LICENSE", b"Made-up weights; no licence is needed.\n")
    return target


def _mlp(inter: int, hidden: int) -> dict[str, tuple[int, int]]:
    return {"down_proj": (hidden, inter), "gate_proj": (inter, hidden), "up_proj": (inter, hidden)}


def _expert_entries(model: Synthetic, layout: str) -> Iterator[Entry]:
    for module, (rows, columns) in model.expert_matrices():
        if layout == "bf16":
            yield module + ".weight", "BF16", (rows, columns)
        else:
            yield module + ".weight", "U8", (rows, columns // 2)
            yield module + ".weight_scale", "U8", (rows, columns // BLOCK)


def _bytes_of(entry: Entry, matrices: Mapping[str, tuple[int, int]], seed: int) -> Bytes:
    name, dtype, shape = entry
    module = name.removesuffix("_scale").removesuffix(".weight")
    if module not in matrices:
        values = _random(name, seed).standard_normal(shape, np.float32) * np.float32(0.02)
        return values.reshape(-1).view(np.uint8) if dtype == "F32" else _bf16(values)
    if dtype == "BF16":
        return _bf16(dequantize(*_expert(module, matrices[module], seed)).astype(np.float32))
    return (
        _scales(module, matrices[module], seed) if name.endswith("_scale") else _codes(module, matrices[module], seed)
    )


def _expert(module: str, shape: tuple[int, int], seed: int) -> tuple[Bytes, Bytes]:
    return _codes(module, shape, seed), _scales(module, shape, seed)


def _codes(module: str, shape: tuple[int, int], seed: int) -> Bytes:
    """Uniform nibbles, both zeros among them."""
    return np.frombuffer(_random(module, seed).bytes(shape[0] * shape[1] // 2), np.uint8).reshape(shape[0], -1)


def _scales(module: str, shape: tuple[int, int], seed: int) -> Bytes:
    """Block exponents within four binades, about where trained weights are."""
    return _random(module + "_scale", seed).integers(117, 121, (shape[0], shape[1] // BLOCK), np.uint8)


def _random(name: str, seed: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def _bf16(values: npt.NDArray[np.float32]) -> Bytes:
    """Rounded to nearest, ties to even."""
    bits = values.reshape(-1).view(np.uint32)
    return (
        ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        .astype(np.uint16)
        .view(np.uint8)
    )


def main(argv: list[str] | None = None) -> int:
    """``python -m m3hal.checkpoint.synthetic``."""
    parser = argparse.ArgumentParser(prog="python -m m3hal.checkpoint.synthetic", description="Write made-up weights.")
    parser.add_argument("directory")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dense", type=int, default=1, help="layers without experts")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=MINIMAX_M3["vocab_size"])
    parser.add_argument("--layout", choices=LAYOUTS, default="quark")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="narrow matrices, to try commands out")
    args = parser.parse_args(argv)
    try:
        model = Synthetic(layers=args.layers, dense=args.dense, experts=args.experts, vocab=args.vocab, seed=args.seed)
        if args.small:
            model = replace(model, **_NARROW)
        print(write(args.directory, model, layout=args.layout))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
