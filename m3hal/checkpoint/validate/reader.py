"""The validator's own reader of safetensors folders, from the published format and from nothing else of m3hal.

Source: the safetensors format: 8 bytes of little-endian header length, a JSON header, tensors without gaps.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m3hal.checkpoint.validate.faults import Broken, Kind

_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U8": 8, "I8": 8, "BOOL": 8}


@dataclass(frozen=True)
class View:
    """A tensor in a file: first and last byte, counted from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def bytes(self) -> npt.NDArray[np.uint8]:
        """Its bytes, mapped, not copied."""
        if self.begin == self.end:
            return np.empty(0, np.uint8)
        return np.memmap(self.file, np.uint8, "r", offset=self.begin, shape=(self.end - self.begin,))

    def rows(self) -> npt.NDArray[np.uint8]:
        """Its bytes as [first extent, bytes per row]."""
        return self.bytes().reshape(self.shape[0], -1)


@dataclass(frozen=True)
class Folder:
    """A checkpoint on disk. Reading a part that is broken raises Broken.

    indexed: shards that the index doesn't name are not read, as no engine reads them.
    """

    path: Path
    indexed: bool = False

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return self.json("config.json")

    @cached_property
    def index(self) -> dict[str, Any] | None:
        """The index, or None for a checkpoint in one file."""
        name = "model.safetensors.index.json"
        return self.json(name) if (self.path / name).exists() else None

    @cached_property
    def shards(self) -> tuple[str, ...]:
        """The names of all safetensors files beside config.json; if ``indexed``, of those that the index names."""
        there = {path.name for path in self.path.glob("*.safetensors")}
        listed = self.index.get("weight_map") if self.indexed and self.index is not None else None
        if isinstance(listed, dict) and listed:
            there = {str(name) for name in listed.values()}
        return tuple(sorted(there))

    @cached_property
    def tensors(self) -> dict[str, View]:
        """Every tensor of every shard."""
        found: dict[str, View] = {}
        for shard in self.shards:
            for name, view in read(self.path / shard).items():
                if name in found:
                    raise Broken(Kind.UNREADABLE, name, f"is in {found[name].file.name} and in {shard}")
                found[name] = view
        return found

    def json(self, name: str) -> dict[str, Any]:
        """An object in a file."""
        try:
            found = json.loads((self.path / name).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise Broken(Kind.UNREADABLE, str(self.path / name), f"is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise Broken(Kind.UNREADABLE, str(self.path / name), "is not a JSON object")
        return found


def read(file: Path) -> dict[str, View]:
    """The tensors of one file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int(np.frombuffer(prefix, "<u8")[0]) if len(prefix) == 8 else size
            if 8 + length > size:
                raise Broken(Kind.UNREADABLE, str(file), "is shorter than its header")
            text = stream.read(length)
    except OSError as error:
        raise Broken(Kind.UNREADABLE, str(file), f"can't be read: {error.strerror}") from None
    try:
        header = json.loads(text, object_pairs_hook=_once)
        header.pop("__metadata__", None)
        views = {name: _view(file, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Broken(Kind.UNREADABLE, str(file), f"has a broken header: {error}") from None
    ends = [8 + length, *sorted(view.end for view in views.values())]
    begins = [*sorted(view.begin for view in views.values()), size]
    if ends != begins:
        raise Broken(Kind.UNREADABLE, str(file), f"has {size} bytes, which its tensors do not fill exactly")
    return views


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("something is named twice")
    return found


def _view(file: Path, base: int, entry: dict[str, Any]) -> View:
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (first, last, *shape)):
        raise ValueError(f"bytes {first!r} to {last!r} and shape {list(shape)}")
    need = _BITS[entry["dtype"]] // 8 * math.prod(shape)
    if last - first != need:
        raise ValueError(f"{last - first} bytes for {entry['dtype']} {list(shape)}")
    return View(file, entry["dtype"], shape, base + first, base + last)
