"""Another checkpoint's experts as MXFP4, in AMD Quark's layout: for tests and demonstrations, not for quality.

Source: OCP Microscaling Formats 1.0; the layout is :mod:`m3hal.checkpoint.convert.quark`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m3hal.checkpoint.convert.container import Entry, read_header
from m3hal.checkpoint.convert.files import write_bytes, write_json
from m3hal.checkpoint.convert.quark import BLOCK, SINGLE
from m3hal.checkpoint.shards import write_shards

Bytes = npt.NDArray[np.uint8]
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_mxfp4(source: str | Path, directory: str | Path, *, shard_bytes: int = 4 << 30) -> Path:
    """A BF16 or float32 checkpoint in one ``model.safetensors`` -> the same in Quark's layout, experts rounded.

    Scales follow OCP Microscaling 1.0 (floor of log2 of the block's largest), elements round to the nearest, ties to
    even. Everything but routed and shared experts stays as it is.
    """
    source, target = Path(source), Path(directory)
    header = read_header(source / SINGLE)
    made: dict[str, tuple[Entry, Bytes]] = {}
    with open(source / SINGLE, "rb") as file:
        for tensor in header.tensors.values():
            file.seek(tensor.start)
            data = np.frombuffer(file.read(tensor.size), np.uint8)
            if "experts." in tensor.name and tensor.name.endswith(".weight"):
                codes, scales = quantize(_as_float64(data, tensor.dtype).reshape(tensor.shape))
                made[tensor.name] = (tensor.name, "U8", codes.shape), codes
                made[tensor.name + "_scale"] = (tensor.name + "_scale", "U8", scales.shape), scales
            else:
                made[tensor.name] = (tensor.name, tensor.dtype, tensor.shape), data
    target.mkdir(parents=True, exist_ok=True)
    write_shards(target, sorted(entry for entry, _ in made.values()), shard_bytes, lambda entry: made[entry[0]][1])
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            write_bytes(target / path.name, path.read_bytes())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write_json(target / "config.json", {**config, "quantization_config": quark_config()})
    return target


def quantize(values: npt.NDArray[np.float64]) -> tuple[Bytes, Bytes]:
    """[N, K] -> MXFP4 codes uint8 [N, K/2], low nibble first, and E8M0 scales uint8 [N, K/32]."""
    blocks = values.reshape(len(values), -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 1 - 2, -127).clip(-127, 127)
    magnitude = np.minimum(np.abs(blocks) / np.exp2(exponent.astype(np.float64))[..., None], 6.0)
    upper = np.searchsorted(_E2M1, magnitude)  # the first that is not smaller
    lower = np.maximum(upper - 1, 0)
    up = _E2M1[upper] - magnitude, magnitude - _E2M1[lower]
    index = np.where((up[0] < up[1]) | ((up[0] == up[1]) & (upper % 2 == 0)), upper, lower)
    nibbles = (index | (np.signbit(blocks) << 3)).astype(np.uint8).reshape(len(values), -1)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, (exponent + 127).astype(np.uint8)


def dequantize(codes: Bytes, scales: Bytes) -> npt.NDArray[np.float64]:
    """[N, K], exactly."""
    nibbles = np.stack((codes & 0xF, codes >> 4), axis=-1).reshape(*scales.shape, BLOCK)
    signed = np.concatenate((_E2M1, -_E2M1))[nibbles]
    values: npt.NDArray[np.float64] = np.ldexp(signed, scales.astype(np.int32)[..., None] - 127)
    return values.reshape(len(codes), -1)


def quark_config() -> dict[str, Any]:
    """``quantization_config`` as Quark writes it for MXFP4 weights and activations."""
    number = {"dtype": "fp4", "qscheme": "per_group", "group_size": BLOCK, "scale_format": "e8m0", "ch_axis": -1}
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": {
            "weight": {**number, "is_dynamic": False},
            "input_tensors": {**number, "is_dynamic": True},
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": [
            *("*lm_head", "*vision_tower*", "*multi_modal_projector*", "*patch_merge_mlp*", "*block_sparse_moe.gate"),
            *("*self_attn*", "*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj"),
        ],
    }


def _as_float64(data: Bytes, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if dtype != "F32":
        raise ValueError(f"experts of dtype {dtype} can't be rounded to MXFP4; BF16 and F32 can")
    return data.view(np.float32).astype(np.float64)
