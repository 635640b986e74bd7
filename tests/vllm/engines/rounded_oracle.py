"""No engine: transformers in fp32, whose keys, values and index keys pass through a storage format by ml_dtypes.

The numbers are rounded where transformers puts them into its cache, by code that shares nothing with m3hal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from _engine import main
from decoding import decode, format_oracle

from m3hal.checkpoint import oracle

Round = Callable[[torch.Tensor], torch.Tensor]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """A quantised checkpoint is decoded first. ``exact`` is the first token with no key or value rounded."""
    checkpoint, scales = Path(job["checkpoint"]), {}
    if "quantization_config" in json.loads((checkpoint / "config.json").read_text()):
        decoded = Path(sys.argv[2]).parent / "decoded"
        scales = decode(checkpoint, decoded)
        checkpoint = decoded
    model = oracle.load(checkpoint)

    def complete(prompt: list[int], kv: str, index: str, tokens: int) -> dict[str, Any]:
        return asdict(oracle.greedy(model, prompt, tokens, rounding_cache(model, kv, index, scales)))

    return {
        "completions": [complete(prompt, job["kv"], job["index"], job.get("tokens", 32)) for prompt in job["prompts"]],
        "exact": [complete(prompt, "float32", "float32", 1) for prompt in job["prompts"]],
    }


def rounding_cache(model: Any, kv: str, index: str, scales: dict[str, Any]) -> Any:
    """transformers' own cache; what is about to be stored is rounded first."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config())
    for number, layer in enumerate(cache.layers):
        k_scale, v_scale = scales.get(str(number), (1.0, 1.0))
        layer.update = storing(layer.update, rounder(kv, k_scale), rounder(kv, v_scale))
        if hasattr(layer, "update_index"):
            layer.update_index = storing(layer.update_index, rounder(index, 1.0))
    return cache


def storing(store: Callable[..., Any], *rounders: Round) -> Callable[..., Any]:
    """``store`` of rounded arguments; there may be more of them than rounders."""

    def update(*tensors: torch.Tensor, **more: Any) -> Any:
        rounded = [round_(tensor) for round_, tensor in zip(rounders, tensors, strict=False)]
        return store(*rounded, *tensors[len(rounded) :], **more)

    return update


def rounder(format: str, scale: float) -> Round:
    """Quantises and dequantises the last axis; scale: the global one."""
    one = np.float32(scale)
    by_name: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "float32": lambda x: x,
        "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
        "fp8": lambda x: format_oracle.decode_e4m3(format_oracle.encode_e4m3(x / one, 448)) * one,
        "nvfp4": lambda x: nvfp4(x, one),
        "mxfp4": mxfp4,
    }
    through = by_name[format]
    return lambda tensor: torch.from_numpy(through(tensor.numpy()))


def nvfp4(x: np.ndarray, scale: np.float32) -> np.ndarray:
    packed, scales = format_oracle.nvfp4(x, scale)
    blocks = format_oracle.decode_e2m1(packed).reshape(*x.shape[:-1], -1, 16)
    return (blocks * format_oracle.decode_e4m3(scales)[..., None] * scale).reshape(x.shape)


def mxfp4(x: np.ndarray) -> np.ndarray:
    """Blocks of 32; the largest magnitude, rounded to two bits, decides the exponent."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(-1).astype(np.float32)
    exponent = np.floor(np.log2((amax.view(np.int32) + np.int32(1 << 21)).view(np.float32))) - 2
    scale = np.exp2(exponent).astype(np.float32)[..., None]
    codes = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (codes * scale).reshape(x.shape).astype(np.float32)


if __name__ == "__main__":
    main(run)
