"""What can be wrong with a converted checkpoint; the number is the exit code of ``m3hal validate``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """Classes of fault. With faults of several classes, the exit code is that of the first in this order."""

    UNREADABLE = 10  # a file is no whole safetensors or JSON file
    MISSING = 11  # a tensor that the source asks for is absent
    UNEXPECTED = 12  # a tensor or shard that the source does not ask for
    SHAPE = 13  # a tensor has another dtype or shape
    INDEX = 14  # model.safetensors.index.json disagrees with the shards
    CONFIG = 15  # config.json does not describe these tensors, or differs elsewhere from the source's
    SCALE = 16  # a row scale is not a positive, finite, normal power of two
    CODE = 17  # an FP8 byte that no exact conversion writes: -0, NaN, infinity, subnormal
    VALUE = 18  # an expert's number differs from the source's
    SHARED = 19  # a shared expert's number differs from the source's
    COPY = 20  # a tensor that should be byte-identical is not
    FILE = 21  # another file of the checkpoint is missing or differs


@dataclass(frozen=True)
class Fault:
    """One finding: its class, the file or tensor, and what is wrong there."""

    kind: Kind
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} ({self.kind}): {self.where}: {self.what}"


class Broken(Exception):
    """A fault that ends the reading of a file."""

    def __init__(self, kind: Kind, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.fault = Fault(kind, where, what)


@dataclass(frozen=True)
class Verdict:
    """All findings, and how much was looked at."""

    faults: tuple[Fault, ...]
    compared: int  # expert matrices compared element by element
    experts: int  # expert matrices there are
    tensors: int

    @property
    def exit_code(self) -> int:
        """0, or the first class of fault."""
        return min((int(fault.kind) for fault in self.faults), default=0)

    def lines(self, most: int = 20) -> Iterable[str]:
        """For people."""
        for fault in self.faults[:most]:
            yield str(fault)
        if len(self.faults) > most:
            counts = Counter(fault.kind.name.lower() for fault in self.faults)
            yield f"... {len(self.faults)} faults: " + ", ".join(f"{n} {name}" for name, n in counts.items())
        looked = f"{self.tensors} tensors, {self.compared} of {self.experts} expert matrices element by element"
        yield f"{'FAULTY' if self.faults else 'valid'}: {looked}"
