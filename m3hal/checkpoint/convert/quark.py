"""The source: a checkpoint whose experts AMD Quark wrote as MXFP4, opened read-only and checked before anything else.

Codes are ``<module>.weight``, U8 [N, K/2], low nibble first; scales are ``<module>.weight_scale``, E8M0 bytes
[N, K/32]. A pair may lie in two shards. Routed experts are ``...block_sparse_moe.experts.<e>.{w1,w2,w3}`` (gate, down,
up), shared ones ``...block_sparse_moe.shared_experts.{gate,up,down}_proj``.

Source: vLLM's Quark loader for the shape of the config, the OCP Microscaling 1.0 formats for the numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3hal.checkpoint.convert.container import Header, Tensor, read_header
from m3hal.checkpoint.convert.errors import ConversionError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BLOCK = 32

_ROUTED = re.compile(r"(?P<layer>.*\.layers\.\d+\.block_sparse_moe)\.experts\.(?P<expert>\d+)\.(?P<part>w[123])")
_SHARED = re.compile(r".*\.layers\.\d+\.block_sparse_moe\.shared_experts\.(gate|up|down)_proj")


@dataclass(frozen=True)
class Located:
    """A tensor and the shard that holds it."""

    shard: str
    tensor: Tensor


@dataclass(frozen=True)
class Quantised:
    """An MXFP4 matrix [rows, columns]: its module's name, its codes and its scales."""

    module: str
    codes: Located
    scales: Located
    routed: bool

    @property
    def rows(self) -> int:
        """Output channels."""
        return self.codes.tensor.shape[0]

    @property
    def columns(self) -> int:
        """Input features."""
        return self.codes.tensor.shape[1] * 2


@dataclass(frozen=True)
class Source:
    """A whole checkpoint: headers by shard, in order, and the MXFP4 matrices among the tensors."""

    folder: Path
    config: Mapping[str, Any]
    indexed: bool
    shards: Mapping[str, Header]
    quantised: tuple[Quantised, ...]


def open_source(folder: Path) -> Source:
    """Reads config, index and headers. Raises ConversionError, saying what is wrong with which file or tensor."""
    if not folder.is_dir():
        raise ConversionError(f"{folder} is not a folder; name the downloaded checkpoint's folder")
    config = read_json(folder / "config.json")
    if not isinstance(text_config(config), dict):
        raise ConversionError(f"{folder / 'config.json'} has a text_config that is no object; download it again")
    check_quantization(config)
    indexed, weight_map = _weight_map(folder)
    names = sorted(set(weight_map.values())) if indexed else [SINGLE]
    shards = {name: read_header(folder / name) for name in names}
    located = _locate(shards, weight_map if indexed else None)
    quantised = tuple(_quantised(located))
    _require_whole_experts(quantised, config)
    return Source(folder, config, indexed, shards, quantised)


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; raises ConversionError naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing; download the checkpoint again") from None
    except OSError as error:
        raise ConversionError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(values, dict):
        raise ConversionError(f"{path} does not hold a JSON object; download it again")
    return values


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the language model; a text-only config is that part."""
    found: Mapping[str, Any] = config.get("text_config", config)
    return found


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raises ConversionError unless the config says Quark, MXFP4, groups of 32 with E8M0 scales, for every layer."""
    found = config.get("quantization_config") or text_config(config).get("quantization_config")
    if not found:
        raise ConversionError("config.json has no quantization_config; this converter takes AMD Quark's MXFP4 layout")
    if not isinstance(found, dict):
        raise ConversionError(f"config.json has the quantization_config {found!r}, which is no object")
    if found.get("quant_method") != "quark":
        raise ConversionError(
            f"config.json says quant_method {found.get('quant_method')!r}; this converter takes 'quark' only, because "
            "other MXFP4 layouts order the nibbles differently"
        )
    layers = found.get("layer_quant_config") or {}
    schemes = {"global_quant_config": found.get("global_quant_config")}
    schemes |= layers if isinstance(layers, dict) else {"layer_quant_config": layers}
    for where, scheme in schemes.items():
        weight = scheme.get("weight") if isinstance(scheme, dict) else None
        if isinstance(weight, list):
            weight = weight[0] if len(weight) == 1 else {"dtype": f"{len(weight)} weight formats at once"}
        have = {key: weight.get(key) for key in _MXFP4} if isinstance(weight, dict) else weight
        if have != _MXFP4:
            raise ConversionError(f"config.json: {where} has weights {have}; this converter takes {_MXFP4}")


_MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": BLOCK, "scale_format": "e8m0"}


def _weight_map(folder: Path) -> tuple[bool, Mapping[str, str]]:
    if not (folder / INDEX).exists():
        if (folder / SINGLE).exists():
            return False, {}
        raise ConversionError(f"{folder} has neither {INDEX} nor {SINGLE}; download the checkpoint again")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{folder / INDEX} has no weight_map; download it again")
    for name, shard in weight_map.items():
        good = isinstance(shard, str) and Path(shard).name == shard and shard.endswith(".safetensors")
        if not good or not shard.isprintable():
            raise ConversionError(f"{folder / INDEX} puts {name} into {shard!r}, which is not a file of the checkpoint")
    return True, weight_map


def _locate(shards: Mapping[str, Header], weight_map: Mapping[str, str] | None) -> Mapping[str, Located]:
    """Every tensor, by name; the index and the headers must say the same."""
    located: dict[str, Located] = {}
    for shard, header in shards.items():
        for name, tensor in header.tensors.items():
            if name in located:
                raise ConversionError(f"{name} is in {located[name].shard} and in {shard}; download both again")
            if weight_map is not None and weight_map.get(name) != shard:
                raise ConversionError(f"{shard} holds {name}, which the index puts into {weight_map.get(name)!r}")
            located[name] = Located(shard, tensor)
    for name in weight_map or ():
        if name not in located:
            raise ConversionError(f"the index puts {name} into {(weight_map or {})[name]}, which does not hold it")
    return located


def _quantised(located: Mapping[str, Located]) -> Iterator[Quantised]:
    """Every matrix with block scales, and every routed expert: one that lacks its scales is an error, not a copy."""
    for name, scales in located.items():
        if name.endswith(".weight_scale") and name.removesuffix("_scale") not in located:
            raise ConversionError(f"{name} scales {name.removesuffix('_scale')}, which the checkpoint lacks")
        if scales.tensor.dtype == "U8" and name.endswith(".weight") and f"{name}_scale" not in located:
            raise ConversionError(f"{name} holds MXFP4 codes, and the checkpoint lacks its scales, {name}_scale")
    for name, codes in located.items():
        module = name.removesuffix(".weight")
        routed = _ROUTED.fullmatch(module) is not None
        if module == name or not (routed or f"{name}_scale" in located):
            continue
        if not routed and not _SHARED.fullmatch(module):
            raise ConversionError(f"{name} is quantised; of MXFP4 this converter takes routed and shared experts only")
        if f"{name}_scale" not in located:
            raise ConversionError(f"{name} is a routed expert without {name}_scale; the checkpoint is not MXFP4")
        found = Quantised(module, codes, located[f"{name}_scale"], routed)
        _check_shapes(found)
        yield found


def _check_shapes(matrix: Quantised) -> None:
    codes, scales = matrix.codes.tensor, matrix.scales.tensor
    if codes.dtype != "U8" or scales.dtype not in ("U8", "F8_E8M0"):
        raise ConversionError(f"{matrix.module} has dtypes {codes.dtype} and {scales.dtype}; MXFP4 has U8 and U8")
    if len(codes.shape) != 2 or codes.shape[1] * 2 % BLOCK or 0 in codes.shape:
        raise ConversionError(f"{codes.name} has shape {list(codes.shape)}; MXFP4 codes are [N, K/2], K % {BLOCK} == 0")
    want = (matrix.rows, matrix.columns // BLOCK)
    if scales.shape != want:
        raise ConversionError(f"{scales.name} has shape {list(scales.shape)}; its codes ask for {list(want)}")


def _require_whole_experts(quantised: tuple[Quantised, ...], config: Mapping[str, Any]) -> None:
    """Each layer with routed experts has all of them, in the config's shapes."""
    text = text_config(config)
    experts, hidden, inter = (text.get(k) for k in ("num_local_experts", "hidden_size", "intermediate_size"))
    layers: dict[str, set[tuple[int, str]]] = {}
    for matrix in quantised:
        match = _ROUTED.fullmatch(matrix.module)
        if match is None:
            continue
        layers.setdefault(match["layer"], set()).add((int(match["expert"]), match["part"]))
        want = (hidden, inter) if match["part"] == "w2" else (inter, hidden)
        if (matrix.rows, matrix.columns) != want:
            raise ConversionError(
                f"{matrix.module} is [{matrix.rows}, {matrix.columns}]; config.json asks for {list(want)}"
            )
    if not layers:
        raise ConversionError("the checkpoint has no routed MXFP4 expert; there is nothing to convert")
    if not isinstance(experts, int):
        raise ConversionError("config.json has no num_local_experts, so missing experts could not be noticed")
    numbers = {int(layer.rpartition(".layers.")[2].partition(".")[0]) for layer in layers}
    frequency = text.get("moe_layer_freq") or []
    if not isinstance(frequency, list):
        raise ConversionError(f"config.json has moe_layer_freq {frequency!r}; it should list the layers")
    for number, has_experts in enumerate(frequency):
        if has_experts and number not in numbers:
            raise ConversionError(f"layer {number} has no routed MXFP4 experts; download the checkpoint again")
    for layer, have in layers.items():
        for part in ("w1", "w2", "w3"):
            missing = [expert for expert in range(experts) if (expert, part) not in have]
            if missing:
                raise ConversionError(f"{layer} lacks {part} of expert {missing[0]}; download the checkpoint again")
        if len(have) != 3 * experts:
            raise ConversionError(f"{layer} has more experts than config.json's num_local_experts, {experts}")
