"""In which format each matrix of a checkpoint is stored, by its ``quantization_config``. Needs neither torch nor vLLM.

A config names modules as the checkpoint does or as an engine does, with or without ``language_model.``, exactly, by a
parent, by a glob or by a regular expression (``re:``). What it gets wrong is noticed when tensors are loaded: every one
that the formats ask for must be there, and no other.
Source: the configs of MiniMax (``mxfp8``), NVIDIA ModelOpt, AMD Quark and compressed-tensors as vLLM 0.32 reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Schemes:
    """default: the format of every linear module that is not excluded; "": the model's dtype. listed: of some only."""

    default: str = ""
    excluded: tuple[str, ...] = ()
    listed: Mapping[str, str] = field(default_factory=dict)

    def of(self, module: str) -> str:
        """The format of one of the checkpoint's modules; "" when it is in the model's dtype."""
        name = bare(module)
        if any(_means(pattern, name) for pattern in self.excluded):
            return ""
        found = [pattern for pattern in self.listed if _means(pattern, name)]
        return self.listed[max(found, key=len)] if found else self.default

    def of_all(self, modules: Iterable[str]) -> str:
        """The one format of modules that are computed together. Raises ValueError naming two that differ."""
        formats = {module: self.of(module) for module in modules}
        first, *others = formats.items()
        for name, format in others:
            if format != first[1]:
                raise ValueError(
                    f"{first[0]} is {first[1] or 'not quantised'} and {name} is {format or 'not quantised'}, but m3hal "
                    "computes them as one matrix; quantise both alike"
                )
        return first[1]


def bare(module: str) -> str:
    """A module's name without the vision-language wrapper's prefix, where checkpoints and engines put it."""
    return module.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


def schemes(found: Mapping[str, Any] | None) -> Schemes:
    """Reads a ``quantization_config``. Raises ValueError, one sentence, for one that m3hal's model does not serve."""
    if not found:
        return Schemes()
    method = str(found.get("quant_method"))
    read = _READERS.get(method)
    if read is None:
        raise _unserved(method)
    return read(found)


def _mxfp8(found: Mapping[str, Any]) -> Schemes:
    return Schemes("mxfp8", tuple(found.get("ignored_layers") or ()))


def _modelopt(found: Mapping[str, Any]) -> Schemes:
    inner = found.get("quantization", found)
    algorithm = str(inner.get("quant_algo")).upper()
    excluded = tuple(inner.get("ignore") or inner.get("exclude_modules") or ())
    if algorithm == "MIXED_PRECISION":
        listed = {bare(name): _algorithm(layer) for name, layer in inner.get("quantized_layers", {}).items()}
        if not listed:
            raise ValueError("the checkpoint is of mixed precision, but its config.json has no 'quantized_layers'")
        return Schemes(excluded=excluded, listed=listed)
    return Schemes(_algorithm({"quant_algo": algorithm, **_group(inner)}), excluded)


def _group(inner: Mapping[str, Any]) -> dict[str, Any]:
    return {key: inner[key] for key in ("group_size",) if key in inner}


#: ModelOpt's name -> m3hal's, and numbers that share a scale
_ALGORITHMS = {"NVFP4": ("nvfp4", 16), "W4A16_NVFP4": ("nvfp4", 16), "MXFP8": ("mxfp8", 32)}


def _algorithm(layer: Mapping[str, Any]) -> str:
    name = str(layer.get("quant_algo")).upper()
    if name not in _ALGORITHMS:
        raise _unserved(f"modelopt {name}")
    format, group = _ALGORITHMS[name]
    if int(layer.get("group_size") or group) != group:
        raise ValueError(f"{name} has groups of {group}; this checkpoint's config.json says {layer['group_size']}")
    return format


def _quark(found: Mapping[str, Any]) -> Schemes:
    """MXFP4 only."""
    from m3hal.checkpoint.convert.errors import ConversionError
    from m3hal.checkpoint.convert.quark import check_quantization

    try:
        check_quantization({"quantization_config": found})
    except ConversionError as error:
        raise ValueError(f"of Quark's layouts m3hal serves MXFP4: {error}") from error
    return Schemes("mxfp4", tuple(found.get("exclude") or ()))


_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def _compressed_tensors(found: Mapping[str, Any]) -> Schemes:
    groups = [_as_dict(group) for group in _as_dict(found.get("config_groups")).values()]
    fits = len(groups) == 1 and groups[0].get("targets") == ["Linear"]
    for kind, wanted in (("weights", _CHANNEL), ("input_activations", _TOKEN)):
        fits = fits and wanted.items() <= _as_dict(groups[0].get(kind)).items()
    if not fits:
        raise _unserved("compressed-tensors")
    return Schemes("fp8_e4m3_240" if "fp8_dtype_flavor" in found else "fp8_e4m3", tuple(found.get("ignore") or ()))


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Schemes]] = {
    "mxfp8": _mxfp8,
    "modelopt": _modelopt,
    "quark": _quark,
    "compressed-tensors": _compressed_tensors,
}


def _unserved(method: str) -> ValueError:
    return ValueError(
        "m3hal serves MXFP8 as MiniMax publishes it, NVFP4, MXFP8 and their mixture as ModelOpt writes them, MXFP4 as "
        f"Quark does, and the FP8 experts of `m3hal convert`; it does not serve quantisation {method!r}"
    )


def _as_dict(values: Any) -> dict[str, Any]:
    return values if isinstance(values, dict) else dict(getattr(values, "__dict__", {}) or {})


def _means(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    pattern = bare(pattern)
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
