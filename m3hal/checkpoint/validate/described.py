"""Whether the index and config.json describe the tensors that are there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from m3hal.checkpoint.validate.faults import Fault, Kind
from m3hal.checkpoint.validate.reader import Folder

_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
_INPUTS = {**_WEIGHTS, "strategy": "token", "dynamic": True}
_GROUPS = [{"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _INPUTS}]
_FLAVORS = (None, "float8_e4m3fnuz")
_SAID = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
}
_CHECKED = {*_SAID, "fp8_dtype_flavor", "config_groups", "ignore"}


def index(new: Folder) -> Iterator[Fault]:
    """The index names each tensor's shard and the sum of their bytes."""
    if new.index is None:
        if new.shards != ("model.safetensors",):
            yield Fault(Kind.INDEX, str(new.path), "has several shards and no index")
        return
    placed = {name: view.file.name for name, view in new.tensors.items()}
    listed, metadata = (_object(new.index.get(key)) for key in ("weight_map", "metadata"))
    for name in sorted(placed.keys() | listed.keys()):
        if placed.get(name) != listed.get(name):
            yield Fault(Kind.INDEX, name, f"is in {placed.get(name)} and the index says {listed.get(name)}")
    total = sum(view.end - view.begin for view in new.tensors.values())
    if metadata.get("total_size") != total:
        yield Fault(Kind.INDEX, "total_size", f"is {metadata.get('total_size')}; the tensors have {total} bytes")


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    """``quantization_config``, outside or inside ``text_config``; empty without one."""
    return _object(config.get("quantization_config")) or _object(
        _object(config.get("text_config")).get("quantization_config")
    )


def config(new: Folder, old: Folder, experts: Iterable[str], others: Iterable[str]) -> Iterator[Fault]:
    """FP8 per channel for the modules in ``experts``, not for those in ``others``; the rest as in the source."""
    if _without_quantization(new.config) != _without_quantization(old.config):
        yield Fault(Kind.CONFIG, "config.json", "differs from the source's outside quantization_config")
    places = [_places(folder.config) for folder in (new, old)]
    if [where for where, _ in places[0]] != [where for where, _ in places[1]]:
        yield Fault(Kind.CONFIG, "config.json", "has a quantization_config in other places than the source's")
    for where, found in places[0]:
        yield from _scheme(where, _object(found))
        yield from _ignored(where, _object(found).get("ignore"), experts, others)


def _scheme(where: str, found: dict[str, Any]) -> Iterator[Fault]:
    for key, want in _SAID.items():
        if found.get(key) != want:
            yield Fault(Kind.CONFIG, where, f"has {key} {found.get(key)!r}; it should be {want!r}")
    if found.get("fp8_dtype_flavor") not in _FLAVORS:
        yield Fault(Kind.CONFIG, where, f"has the unknown fp8_dtype_flavor {found['fp8_dtype_flavor']!r}")
    groups = list(_object(found.get("config_groups")).values())
    if groups != _GROUPS:
        yield Fault(Kind.CONFIG, where, f"has config_groups {groups}; the tensors are {_GROUPS}")
    for key in sorted(found.keys() - _CHECKED):
        if found[key] is not None:
            yield Fault(Kind.CONFIG, where, f"has {key}, which no conversion writes and an engine may act on")


def _ignored(where: str, ignore: Any, experts: Iterable[str], others: Iterable[str]) -> Iterator[Fault]:
    """As engines read it: a name, or, after ``re:``, a pattern that matches at a name's start."""
    try:
        names = [re.escape(name) + "$" if name[:3] != "re:" else name[3:] for name in ignore]
        patterns = [re.compile(name) for name in names]
    except (TypeError, re.error) as error:
        yield Fault(Kind.CONFIG, where, f"has an ignore list that can't be read: {error}")
        return
    for modules, wanted in ((experts, False), (others, True)):
        for module in modules:
            if any(pattern.match(module) for pattern in patterns) != wanted:
                said = "is not ignored, so an engine takes it for FP8" if wanted else "is ignored and holds FP8"
                yield Fault(Kind.CONFIG, module, f"{said} ({where})")
                break


def _places(config: dict[str, Any]) -> list[tuple[str, Any]]:
    inside = _object(config.get("text_config"))
    places = (("quantization_config", config), ("text_config.quantization_config", inside))
    return [(where, values["quantization_config"]) for where, values in places if "quantization_config" in values]


def _object(value: Any) -> dict[str, Any]:
    """A JSON object; an empty one in place of anything else, which then lacks what is looked for."""
    return value if isinstance(value, dict) else {}


def _without_quantization(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_quantization(value) if key == "text_config" and isinstance(value, dict) else value
        for key, value in values.items()
        if key != "quantization_config"
    }
