"""What lies in a GPU's memory when it serves MiniMax-M3: weights of a rank, caches of a sequence. Bytes throughout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from m3hal.dispatch.errors import ConfigurationError, did_you_mean
from m3hal.formats import spec_of
from m3hal.layouts import CACHE_FORMATS, KVLayout, page_map
from m3hal.shape import ModelShape

#: memory as published, decimal gigabytes
GPUS: Mapping[str, float] = {
    "H100": 80,
    "H200": 141,
    "B200": 192,
    "B300": 288,
    "GB200": 192,
    "GB300": 288,
    "MI300X": 192,
    "MI325X": 256,
    "MI350X": 288,
    "MI355X": 288,
    "Gaudi2": 96,
    "Gaudi3": 128,
}

#: short names of formats, as engines spell them
ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp8": "fp8_e4m3"}

#: checkpoints' weights: (routed experts, every other projection). Embeddings and the vision tower are bf16.
SCHEMES: Mapping[str, tuple[str, str]] = {
    "bf16": ("bfloat16", "bfloat16"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp4": ("mxfp4", "mxfp4"),
    "nvfp4": ("nvfp4", "mxfp8"),  # MiniMax-M3.1-Flash
    "fp8": ("fp8_e4m3", "bfloat16"),  # per channel, as on Gaudi
}


_MOST_LAYERS = 1000


@dataclass(frozen=True)
class Parallel:
    """How a model is laid over ``ranks`` GPUs.

    tp: everything is divided. tep: attention and dense MLPs are divided, each rank holds whole experts. dep: whole
    experts too, but each rank holds all else and serves sequences of its own.
    """

    kind: str
    ranks: int

    @classmethod
    def parse(cls, text: str) -> Parallel:
        found = re.fullmatch(r"(tp|tep|dep)(\d+)", text.lower())
        if not found or int(found[2]) == 0:
            raise ConfigurationError(f"--parallel {text} must be tp, tep or dep and a number of GPUs, e.g. dep4.")
        return cls(found[1], int(found[2]))

    @property
    def tensor(self) -> int:
        """Ranks that share one sequence."""
        return 1 if self.kind == "dep" else self.ranks

    @property
    def expert(self) -> int:
        return 1 if self.kind == "tp" else self.ranks


@dataclass(frozen=True)
class Weights:
    """Of one rank."""

    routed: int
    projections: int
    embeddings: int
    rest: int  # routers, norms, and the vision tower, which every rank holds whole

    @property
    def total(self) -> int:
        return self.routed + self.projections + self.embeddings + self.rest


def weights_of(shape: ModelShape, config: Mapping[str, Any], scheme: str, parallel: Parallel) -> Weights:
    """shape: of one rank."""
    routed_format, other_format = SCHEMES[scheme]
    hidden, sparse = shape.hidden_size, shape.num_layers - shape.num_dense_attention_layers
    moe = shape.num_layers - shape.num_dense_mlp_layers
    # shared experts are divided like dense MLPs, whatever becomes of the routed ones
    shared = shape.num_shared_experts * shape.intermediate_size
    if parallel.kind == "tep":
        shared //= parallel.tensor

    def mlp(format: str, inner: int) -> int:
        return _matrix(format, 2 * inner, hidden) + _matrix(format, hidden, inner)

    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    attention = _matrix(other_format, heads * shape.head_dim, hidden)
    attention += _matrix(other_format, hidden, shape.num_q_heads * shape.head_dim)
    index = _matrix(other_format, (shape.num_index_heads + 1) * shape.index_dim, hidden)
    projections = shape.num_layers * attention + sparse * index
    projections += shape.num_dense_mlp_layers * mlp(other_format, shape.dense_intermediate_size)
    projections += moe * mlp(other_format, shared)
    return Weights(
        routed=moe * shape.num_local_experts * mlp(routed_format, shape.intermediate_size),
        projections=projections,
        embeddings=2 * _matrix("bfloat16", shape.vocab_size, hidden) // parallel.tensor,
        rest=moe * (hidden + 1) * shape.num_experts * 4 + (2 * shape.num_layers + 1) * hidden * 2 + _vision(config),
    )


def _matrix(format: str, rows: int, columns: int) -> int:
    spec = spec_of(format)
    return rows * (spec.data_bytes(columns) + spec.scale_bytes(columns))


def _vision(config: Mapping[str, Any]) -> int:
    """bf16 bytes of the vision tower and its projector; 0 for a text model. Biases and norms are left out."""
    vision = config.get("vision_config")
    if not vision:
        return 0
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    patches = vision.get("temporal_patch_size", 2) * vision.get("num_channels", 3) * vision["patch_size"] ** 2
    tower = vision["num_hidden_layers"] * (4 * width**2 + 2 * width * inner) + patches * width
    merged, projected = width * vision.get("spatial_merge_size", 2) ** 2, config.get("projector_hidden_size", 6144)
    return int(2 * (tower + merged * projected + projected**2))


def cache_format(name: str, what: str) -> str:
    """A cache format by any of its names."""
    format = ALIASES.get(name, name)
    if format not in CACHE_FORMATS or format == "float64":
        known = sorted({*CACHE_FORMATS, *ALIASES} - {"float64"})
        raise ConfigurationError(f"{what} {name} is no cache format.{did_you_mean(name, known)}")
    return format


def drafter_caches(text: str, page_size: int) -> tuple[KVLayout, ...]:
    """``6x8x128:fp8``: the caches of 6 layers of 8 heads of dimension 128."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+):(\w+)", text)
    if not found:
        raise ConfigurationError(f"--drafter {text} must read LAYERSxHEADSxDIM:FORMAT, e.g. 6x8x128:fp8.")
    layers, heads, dim = (int(found[i]) for i in (1, 2, 3))
    if not (0 < layers <= _MOST_LAYERS and heads > 0 and dim > 0):
        raise ConfigurationError(f"--drafter {text} must have 1 to {_MOST_LAYERS} layers, heads and a dimension.")
    format = cache_format(found[4], "the drafter's")
    return (KVLayout(page_map(format, ""), format, page_size, heads, dim, has_values=True),) * layers


def gpu_memory(name: str) -> int:
    """Bytes of a GPU by its name."""
    known = {gpu.lower(): size for gpu, size in GPUS.items()}
    if name.lower() not in known:
        raise ConfigurationError(f"{name} is no GPU m3hal knows; pass --memory GB.{did_you_mean(name, GPUS)}")
    return int(known[name.lower()] * 1e9)


def shape_of(config: Mapping[str, Any], parallel: Parallel, kv: str, index: str, context: int) -> ModelShape:
    """The model on one rank. ValueError when the configuration is not MiniMax-M3's or can't be divided so."""
    shape = ModelShape.from_config(
        config,
        dtype="bfloat16",
        page_size=1,
        max_tokens=1,
        max_seqs=1,
        max_context=context,
        tensor_parallel=parallel.tensor,
        expert_parallel=parallel.expert,
        kv_format=kv,
        index_format=index,
    )
    return replace(shape, page_size=shape.block_size)
