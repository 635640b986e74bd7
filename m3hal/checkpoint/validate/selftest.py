"""Whether the validator can fail: a small copy, corrupted one way at a time, and each corruption must be found.

The copy holds a few rows of one expert, of one shared expert, and two other tensors; both sides are cut alike.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m3hal.checkpoint.validate.checks import expect, validate
from m3hal.checkpoint.validate.described import quantization
from m3hal.checkpoint.validate.faults import Broken, Kind
from m3hal.checkpoint.validate.reader import Folder

_ROWS = 16
_SHARD = "model-00001-of-00001.safetensors"


@dataclass
class Copy:
    """A checkpoint in memory: name -> (dtype, shape, bytes); what the corruptions work on."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]]
    total: int = 0
    lost_bytes: int = 0
    licence: bytes = b"a licence\n"
    expert: str = ""

    def write(self, folder: Path) -> None:
        """As one shard with its index."""
        entries: dict[str, Any] = {}
        end = 0
        for name, (dtype, shape, data) in self.tensors.items():
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + data.size]}
            end += data.size
        head = json.dumps(entries).encode()
        whole = (
            len(head).to_bytes(8, "little") + head + b"".join(data.tobytes() for _, _, data in self.tensors.values())
        )
        folder.mkdir(parents=True)
        (folder / _SHARD).write_bytes(whole[: len(whole) - self.lost_bytes])
        places = dict.fromkeys(self.tensors, _SHARD)
        index = {"metadata": {"total_size": end + self.total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "LICENSE").write_bytes(self.licence)

    def bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, to be changed in place."""
        dtype, shape, data = self.tensors[name]
        self.tensors[name] = dtype, shape, data.copy()
        return self.tensors[name][2]

    def weight(self, part: str) -> npt.NDArray[np.uint8]:
        """The FP8 bytes of one of the expert's matrices."""
        return self.bytes(f"{self.expert}.{part}.weight")

    def scale(self, part: str) -> npt.NDArray[np.float32]:
        """The row scales of one of the expert's matrices."""
        found: npt.NDArray[np.float32] = self.bytes(f"{self.expert}.{part}.weight_scale").view("<f4")
        return found


def self_test(target: Path, source: Path) -> Iterator[tuple[str, Kind | None, int]]:
    """Yields what was done to the copy, the class of fault it is, and the exit code that came; first the clean copy."""
    new, old = cut(Folder(target), Folder(source, indexed=True))
    with tempfile.TemporaryDirectory() as place:
        old.write(Path(place) / "source")
        corruptions: list[tuple[str, Kind | None, Callable[[Copy], object]]] = [("untouched", None, lambda copy: None)]
        for name, kind, corrupt in [*corruptions, *CORRUPTIONS]:
            copy = replace(new, config=json.loads(json.dumps(new.config)), tensors=dict(new.tensors))
            corrupt(copy)
            folder = Path(place) / "target"
            copy.write(folder)
            yield name, kind, validate(folder, Path(place) / "source").exit_code
            shutil.rmtree(folder)


def cut(new: Folder, old: Folder) -> tuple[Copy, Copy]:
    """A few rows of a few tensors of both. Raises Broken when they aren't a pair that could be cut."""
    expected = expect(old)
    if not expected.experts or not expected.shared or len(expected.copies) < 2:
        raise Broken(Kind.MISSING, str(old.path), "has no expert, no shared expert, or too few other tensors")
    expert = expected.experts[0].rsplit(".", 1)[0]
    modules = [f"{expert}.{part}" for part in ("w1", "w2", "w3")] + [expected.shared[0]]
    smallest = sorted(expected.copies, key=lambda name: (old.tensors[name].end - old.tensors[name].begin, name))[:2]
    names = {module + suffix for module in modules for suffix in (".weight", ".weight_scale")} | set(smallest)
    return (
        Copy(new.config, _rows(new, names), expert=expert),
        Copy(old.config, _rows(old, names), expert=expert),
    )


def _rows(folder: Folder, names: set[str]) -> dict[str, tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]]:
    found = {}
    for name in sorted(names.intersection(folder.tensors)):
        view = folder.tensors[name]
        keep = min(_ROWS, view.shape[0]) if view.shape else 0
        data = np.array(view.rows()[:keep]).reshape(-1) if view.shape else np.array(view.bytes())
        found[name] = view.dtype, (keep, *view.shape[1:]) if view.shape else (), data
    return found


def _nonzero(data: npt.NDArray[np.uint8]) -> int:
    return int(np.flatnonzero(data & 0x7F)[0])


def _flip_sign(copy: Copy) -> None:
    data = copy.weight("w1")
    data[_nonzero(data)] ^= 0x80


def _flip_half(copy: Copy) -> None:
    """1 becomes 1.5: what one flipped nibble bit of the source would do."""
    data = copy.weight("w2")
    data[_nonzero(data)] ^= 0x04


def _double_scale(copy: Copy) -> None:
    data = copy.weight("w3")
    columns = copy.tensors[f"{copy.expert}.w3.weight"][1][1]
    copy.scale("w3")[_nonzero(data) // columns] *= 2


def _crooked_scale(copy: Copy) -> None:
    copy.scale("w1")[0] *= np.float32(1.5)


def _no_scale(copy: Copy) -> None:
    copy.scale("w1")[0] = np.nan


def _swap(copy: Copy) -> None:
    """Gate for up, weights and scales alike: fluent nonsense when served."""
    for suffix in (".weight", ".weight_scale"):
        gate, up = copy.expert + ".w1" + suffix, copy.expert + ".w3" + suffix
        copy.tensors[gate], copy.tensors[up] = copy.tensors[up], copy.tensors[gate]


def _set_byte(value: int) -> Callable[[Copy], None]:
    def corrupt(copy: Copy) -> None:
        copy.weight("w1")[0] = value

    return corrupt


def _drop(copy: Copy) -> None:
    del copy.tensors[copy.expert + ".w2.weight_scale"]


def _add(copy: Copy) -> None:
    copy.tensors[copy.expert + ".w4.weight"] = copy.tensors[copy.expert + ".w1.weight"]


def _transpose(copy: Copy) -> None:
    name = copy.expert + ".w1.weight"
    dtype, shape, data = copy.tensors[name]
    copy.tensors[name] = dtype, shape[::-1], data


def _touch(choose: Callable[[str], bool]) -> Callable[[Copy], None]:
    def corrupt(copy: Copy) -> None:
        copy.bytes(next(name for name in copy.tensors if choose(name)))[-1] ^= 0x01

    return corrupt


def _per_tensor(copy: Copy) -> None:
    quantization(copy.config)["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"


def _attention_as_fp8(copy: Copy) -> None:
    """The ignore list lost: an engine would look for scales of every other matrix."""
    quantization(copy.config)["ignore"] = []


def _set(name: str, value: Any) -> Callable[[Copy], None]:
    return lambda copy: setattr(copy, name, value)


#: what is done, the class of fault it is, how
CORRUPTIONS: tuple[tuple[str, Kind, Callable[[Copy], object]], ...] = (
    ("one sign of w1 flipped", Kind.VALUE, _flip_sign),
    ("one nibble's worth of w2 flipped", Kind.VALUE, _flip_half),
    ("one scale of w3 doubled", Kind.VALUE, _double_scale),
    ("one scale not a power of two", Kind.SCALE, _crooked_scale),
    ("one scale NaN", Kind.SCALE, _no_scale),
    ("w1 and w3 swapped", Kind.VALUE, _swap),
    ("a tensor missing", Kind.MISSING, _drop),
    ("a tensor too many", Kind.UNEXPECTED, _add),
    ("rows and columns exchanged", Kind.SHAPE, _transpose),
    ("total_size of the index off by one", Kind.INDEX, _set("total", 1)),
    ("0x80, negative zero", Kind.CODE, _set_byte(0x80)),
    ("exponent field 15 and mantissa 7", Kind.CODE, _set_byte(0x7F)),
    ("a subnormal", Kind.CODE, _set_byte(0x01)),
    ("one bit of a shared expert", Kind.SHARED, _touch(lambda name: ".shared_experts." in name)),
    ("one bit of another tensor", Kind.COPY, _touch(lambda name: "experts." not in name)),
    ("the last byte of a shard lost", Kind.UNREADABLE, _set("lost_bytes", 1)),
    ("the config per tensor", Kind.CONFIG, _per_tensor),
    ("the config's ignore list lost", Kind.CONFIG, _attention_as_fp8),
    ("the licence changed", Kind.FILE, _set("licence", b"another\n")),
)
