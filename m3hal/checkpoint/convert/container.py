"""Safetensors files: headers read and checked, headers written, the same bytes for the same tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3hal.checkpoint.convert.errors import ConversionError

#: bytes of one element
ITEM_SIZE = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
#: name, dtype, shape
Entry = tuple[str, str, tuple[int, ...]]
_MAX_HEADER = 100 << 20  # the format's own limit


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; start is its absolute offset in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says it holds, checked against its size."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    file_size: int
    raw: bytes


def read_header(path: Path) -> Header:
    """Raises ConversionError for anything but a whole, gapless safetensors file."""
    try:
        with open(path, "rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 or not 2 <= length <= min(_MAX_HEADER, file_size - 8):
                raise _broken(path, "its first 8 bytes don't give the length of a header")
            raw = file.read(length)
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing; download the checkpoint again") from None
    except OSError as error:
        raise ConversionError(f"{path} can't be read: {error.strerror}") from None
    try:
        entries = json.loads(raw, object_pairs_hook=_unique)
        metadata = _metadata(entries.pop("__metadata__", {}))
        tensors = {name: _tensor(name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(path, f"its header is not readable ({error})") from None
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.size)):
        if tensor.start != end:
            raise _broken(path, f"{tensor.name} starts at byte {tensor.start} instead of {end}")
        end += tensor.size
    if file_size != end:
        raise _broken(path, f"it has {file_size} bytes and its header promises {end}")
    return Header(path, tensors, metadata, file_size, raw)


def layout(tensors: Iterable[Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """The head of a file that holds these tensors, each one's absolute offset, and the size of the file.

    Largest elements come first, then names in order: each element lies on a multiple of its size, and the same tensors
    give the same bytes.
    """
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    starts, end = {}, 0
    for name, dtype, shape in sorted(tensors, key=lambda entry: (-ITEM_SIZE[entry[1]], entry[0])):
        starts[name] = end
        end += size_of(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + start for name, start in starts.items()}, len(head) + end


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    count = ITEM_SIZE[dtype]
    for extent in shape:
        count *= extent
    return count


def _tensor(name: str, entry: Mapping[str, Any], base: int) -> Tensor:
    name.encode()  # an unpaired surrogate could be read and not written
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if dtype not in ITEM_SIZE:
        raise ValueError(f"{name} has the unknown dtype {dtype!r}")
    if not all(isinstance(extent, int) and extent >= 0 for extent in (*shape, start, end)):
        raise ValueError(f"{name} has a negative or broken extent")
    if end - start != size_of(dtype, shape):
        raise ValueError(f"{name} takes {end - start} bytes; {dtype} {list(shape)} takes {size_of(dtype, shape)}")
    return Tensor(name, dtype, shape, base + start, end - start)


def _metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("its __metadata__ does not map names to text")
    json.dumps(found, ensure_ascii=False).encode()
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it names something twice")
    return found


def _broken(path: Path, why: str) -> ConversionError:
    return ConversionError(f"{path} is not a whole safetensors file: {why}; download it again")
