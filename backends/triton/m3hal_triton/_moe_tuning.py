"""How the experts' products are tiled, by storage format and by how many tokens an expert has; found on an H200."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from m3hal.shape import Site
from m3hal_triton._moe_by_warps import STEP
from m3hal_triton._moe_decode import DEPTH


@dataclass(frozen=True)
class Tile:
    """Launch parameters of a product. rows: of the weights; depth: of K. programs: on each multiprocessor, towards
    which K is split where experts are few; 0: never. registers: of a thread, at most, on Hopper; 0: as many as ptxas
    likes."""

    rows: int
    depth: int
    warps: int = 4
    stages: int = 4
    programs: int = 0
    registers: int = 0


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


@dataclass(frozen=True)
class Warps:
    """Launch parameters of a product in which warps have weights of their own (:mod:`_moe_by_warps`). rows, warps: of a
    program, and of w2, whose programs have all experts of a token, of each expert; along: warps that share the columns
    of a row, of w2 all. registers: as in :class:`Tile`."""

    rows: int
    warps: int
    along: int
    registers: int = 0

    def for_size(self, size: int) -> Warps:
        """For rows of so many columns, of which a warp takes whole steps."""
        along = math.gcd(self.along, size // STEP.value)
        return replace(self, along=along, warps=self.warps // self.along * along)


_ALL = float("inf")
#: (pairs for each expert up to which it is taken, tuning)
Ladder = tuple[tuple[float, Tuning], ...]
_MANY = Tuning(256, Tile(128, 64, warps=8), Tile(128, 64, warps=8), extra=32)
_SOME = Tuning(64, Tile(128, 128, stages=3), Tile(128, 128, stages=3))
_PLAIN_FEW, _PLAIN_MANY = Tile(128, 128, stages=3), Tile(128, 64, warps=8, stages=3)
_PLAIN_FIRST = (0.1, Tuning(16, Tile(64, 128, stages=3, programs=3), Tile(64, 128, stages=3, programs=3)))
_PLAIN: Ladder = (
    _PLAIN_FIRST,
    (4, Tuning(16, _PLAIN_FEW, _PLAIN_FEW)),
    (24, Tuning(32, Tile(128, 64, warps=8, stages=5), Tile(128, 64, warps=8, stages=5))),
    (96, Tuning(64, Tile(128, 64), Tile(128, 64))),
    (_ALL, Tuning(256, _PLAIN_MANY, _PLAIN_MANY, extra=32)),
)
_SPLIT = Tile(128, 128, stages=3, programs=4)
_E4M3_FEW = Tile(64, 256, stages=3)
#: three programs share a multiprocessor; with ptxas's choice of 190 registers two would
_E4M3_HALVED = Tile(128, 128, stages=3, registers=168)
_E4M3: Ladder = (
    (4, Tuning(16, _E4M3_FEW, _E4M3_FEW)),
    (24, Tuning(32, _E4M3_HALVED, _E4M3_HALVED)),
    (96, _SOME),
    (_ALL, _MANY),
)
_E2M1_FEW = Tile(128, 128)
_SPLIT_FEW = (0.1, Tuning(16, _SPLIT, _SPLIT))
_E2M1_MANY = Tuning(128, Tile(128, 128, warps=8, stages=3), Tile(128, 128, warps=8, stages=3), extra=16)
_E2M1: Ladder = (_SPLIT_FEW, (4, Tuning(16, _E2M1_FEW, _E2M1_FEW)), *_E4M3[1:-1], (_ALL, _E2M1_MANY))
#: where ranks share the inner dimension: half as many rows, or half the depth, make more programs of what is left
_SHARE = 1536
_PLAIN_SHARED: Ladder = (
    _PLAIN_FIRST,
    (4, Tuning(16, Tile(64, 128), _PLAIN_FEW)),
    *_PLAIN[2:],
)
_E4M3_SHARED: Ladder = (_SPLIT_FEW, (4, Tuning(16, _E4M3_FEW, Tile(128, 128))), *_E4M3[1:])
#: of few pairs' w13 the programs of 128 rows are too few to wait for one another's codes
_E2M1_SHARED: Ladder = (_SPLIT_FEW, (0.5, Tuning(16, _E4M3_FEW, _E2M1_FEW)), *_E2M1[1:])
#: IEEE products of fp32 hold their operands in registers
NARROW: Ladder = ((_ALL, Tuning(16, Tile(64, 32, stages=2), Tile(64, 32, stages=2))),)
#: one for any number of tokens
FIXED: Ladder = ((_ALL, Tuning(64, Tile(128, 128, stages=3), Tile(128, 128, stages=3))),)
#: activations in FP8
ROUNDED: Ladder = (
    (4, Tuning(16, Tile(128, 256, stages=3, programs=2), Tile(128, 256, stages=3, programs=2))),
    (24, Tuning(32, Tile(128, 128), Tile(128, 128))),
    (64, Tuning(64, Tile(128, 128), Tile(128, 128))),
    (_ALL, Tuning(256, Tile(128, 128, warps=8, stages=3), Tile(128, 128, warps=8, stages=3), extra=32)),
)


#: pairs up to which four-bit weights are multiplied by warps
BY_WARPS = 12
_DOWN = Warps(16, 2, 2, 80)
_WARPS, _WARPS_SHARED = (Warps(64, 4, 4, 168), _DOWN), (Warps(16, 8, 8, 80), _DOWN)


def by_warps(site: Site, *, is_nvidia: bool) -> tuple[Warps, Warps] | None:
    """Of both products for BY_WARPS pairs: where matrices of four-bit codes lie in pieces."""
    sizes = site.hidden_size, site.intermediate_size
    is_packed = site.weight_format in ("mxfp4", "nvfp4") and all(size % DEPTH.value == 0 for size in sizes)
    if not is_packed or not is_nvidia or site.dtype != "bfloat16" or site.lora_rank:
        return None
    tiles = _WARPS_SHARED if site.intermediate_size < _SHARE else _WARPS
    return tiles[0].for_size(sizes[0]), tiles[1].for_size(sizes[1])


def scaled(depth: int) -> Ladder:
    """Where the matrix unit takes blocks; untuned. depth: of K, 128 bytes of codes."""
    few, many = Tile(128, depth, stages=3), Tile(128, depth, warps=8, stages=3)
    return (
        (4, Tuning(16, few, few)),
        (24, Tuning(32, few, few)),
        (96, Tuning(64, few, few)),
        (_ALL, Tuning(128, many, many)),
    )


#: whole experts, then those that ranks share
_LADDERS: Mapping[str, tuple[Ladder, Ladder]] = {
    "bfloat16": (_PLAIN, _PLAIN_SHARED),
    "fp8_e4m3": (_E4M3, _E4M3_SHARED),
    "mxfp8": (_E4M3, _E4M3_SHARED),
    "mxfp4": (_E2M1, _E2M1_SHARED),
    "nvfp4": (_E2M1, _E2M1_SHARED),
}


#: many tokens where registers are fewer: untuned
_PORTABLE = Tuning(128, Tile(128, 64, warps=8, stages=2), Tile(128, 64, warps=8, stages=2))
#: four-bit codes fill no fewer columns
_PORTABLE_E2M1 = Tuning(128, Tile(128, 128, warps=8, stages=2), Tile(128, 128, warps=8, stages=2))


def ladder_of(site: Site, *, rounds: bool, is_nvidia: bool) -> Ladder:
    """By the storage format of the routed experts, and by how many of their features are here.

    rounds: activations are in FP8.
    """
    if site.dtype == "float32":
        return NARROW
    whole, shared = (ROUNDED, ROUNDED) if rounds else _LADDERS[site.weight_format]
    ladder = shared if site.intermediate_size < _SHARE else whole
    return ladder if is_nvidia else (*ladder[:-1], (_ALL, _PORTABLE_E2M1 if ladder[-1] is _E2M1[-1] else _PORTABLE))
