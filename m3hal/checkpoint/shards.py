"""A checkpoint's shards, index and checksums, from tensors that are made one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m3hal.checkpoint.convert.container import Entry, layout, size_of
from m3hal.checkpoint.convert.files import Output, write_bytes, write_json
from m3hal.checkpoint.convert.quark import INDEX
from m3hal.checkpoint.convert.sums import SUMS

#: makes the bytes of a tensor
Make = Callable[[Entry], npt.NDArray[np.uint8]]


def write_shards(target: Path, entries: Iterable[Entry], shard_bytes: int, make: Make) -> None:
    """Writes the tensors in the given order, a new shard when one would hold more than ``shard_bytes``."""
    groups = _groups(entries, shard_bytes)
    sums, weight_map, total = [], {}, 0
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        head, starts, size = layout(group, {"format": "pt"})
        output = Output(target / name, size)
        output.write(0, head)
        for entry in group:
            output.write(starts[entry[0]], np.ascontiguousarray(make(entry)))
        output.commit()
        weight_map.update(dict.fromkeys(starts, name))
        total += size - len(head)
        with open(target / name, "rb") as file:
            sums.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    write_bytes(target / SUMS, "".join(sums).encode())


def _groups(entries: Iterable[Entry], shard_bytes: int) -> list[list[Entry]]:
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        size = size_of(entry[1], entry[2])
        if filled and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    return groups
