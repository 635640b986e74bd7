"""How the experts' products are tiled, by storage format and by how many tokens an expert has; found on an H200."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from m3hal.shape import Site


@dataclass(frozen=True)
class Tile:
    """Launch parameters of a product. rows: of the weights; depth: of K. programs: on each multiprocessor, towards
    which K is split where experts are few; 0: never."""

    rows: int
    depth: int
    warps: int = 4
    stages: int = 4
    programs: int = 0


@dataclass(frozen=True)
class Tuning:
    """tokens, extra: of a work item, at most; extra ones come in a product of their own."""

    tokens: int
    up: Tile
    down: Tile
    extra: int = 0

    @property
    def most(self) -> int:
        return self.tokens + self.extra


_ALL = float("inf")
#: (pairs for each expert up to which it is taken, tuning)
Ladder = tuple[tuple[float, Tuning], ...]
_PLAIN: Ladder = (
    (4, Tuning(16, Tile(128, 128, stages=3, programs=2), Tile(128, 64, programs=2))),
    (24, Tuning(32, Tile(128, 64, warps=8, stages=5), Tile(128, 64, warps=8, stages=5))),
    (64, Tuning(64, Tile(128, 64), Tile(128, 64))),
    (_ALL, Tuning(128, Tile(256, 64, 8), Tile(256, 64, 8))),
)
_STORED: Ladder = (
    (4, Tuning(16, Tile(128, 256, stages=3, programs=2), Tile(128, 128, programs=2))),
    (24, Tuning(32, Tile(128, 256, warps=8, stages=3), Tile(128, 128))),
    (64, Tuning(64, Tile(128, 128), Tile(128, 128))),
    (_ALL, Tuning(256, Tile(128, 64, warps=8), Tile(128, 64, warps=8))),
)
#: IEEE products of fp32 hold their operands in registers
NARROW: Ladder = ((_ALL, Tuning(16, Tile(64, 32, stages=2), Tile(64, 32, stages=2))),)
#: one for any number of tokens
FIXED: Ladder = ((_ALL, Tuning(64, Tile(128, 128, stages=3), Tile(128, 128, stages=3))),)
_LADDERS: Mapping[str, Ladder] = {"bfloat16": _PLAIN}


def ladder_of(site: Site) -> Ladder:
    """By the storage format of the routed experts."""
    return _LADDERS.get(site.weight_format, _STORED)
