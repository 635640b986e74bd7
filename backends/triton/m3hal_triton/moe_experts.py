"""``moe_experts``: each token's chosen experts, weighted and summed in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from m3hal.dispatch.manifest import Kernel
from m3hal.formats import PLAIN_FORMATS
from m3hal.ops import ExpertLoRA, load
from m3hal.shape import Site
from m3hal_triton import _moe_align as align
from m3hal_triton import _moe_gemm as gemm
from m3hal_triton import _moe_weights as packing
from m3hal_triton._launch import DOT_PRECISION, after, power_of_two_above, programmatic
from m3hal_triton._moe_weights import Matrix, Packed

#: columns of one program of the sum
COLUMNS = 2048


@dataclass(frozen=True)
class Tile:
    """Launch parameters of a product. rows: of the weights; depth: of K."""

    rows: int
    depth: int
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True)
class Tuning:
    """tokens: of a tile, at most."""

    tokens: int
    up: Tile
    down: Tile


#: found on an H200, by storage format: (pairs for each expert up to which it is taken, tuning)
Ladder = tuple[tuple[float, Tuning], ...]
_FEW = Tile(128, 128)
_MANY = Tile(128, 64, warps=8)
_PLAIN: Ladder = (
    (4, Tuning(16, Tile(64, 128), Tile(64, 128))),
    (24, Tuning(32, Tile(128, 64), Tile(128, 64))),
    (64, Tuning(64, Tile(128, 64), Tile(128, 64))),
    (float("inf"), Tuning(128, Tile(256, 64, 8), Tile(256, 64, 8))),
)
_STORED: Ladder = (
    (4, Tuning(16, _FEW, _FEW)),
    (24, Tuning(32, _FEW, _FEW)),
    (64, Tuning(64, _FEW, _FEW)),
    (float("inf"), Tuning(128, _MANY, _MANY)),
)
#: IEEE products of fp32 hold their operands in registers
NARROW: Ladder = ((float("inf"), Tuning(16, Tile(64, 32, stages=2), Tile(64, 32, stages=2))),)
LADDERS: Mapping[str, Ladder] = {
    "bfloat16": _PLAIN,
    "fp8_e4m3": _STORED,
    "mxfp8": _STORED,
    "mxfp4": _STORED,
    "nvfp4": _STORED,
}


def moe_experts(site: Site) -> Kernel:
    """The kernel for a site: tiles are chosen by the number of tokens."""
    wide = site.dtype == "float32"
    ladder = NARROW if wide else LADDERS[site.weight_format]
    return _kernel(site, _Run(site, ladder, wide))


def _kernel(site: Site, run: _Run) -> Kernel:
    return Kernel(
        run=run,
        workspace_bytes=run.room(site.max_tokens).total,
        prepare_weights=partial(packing.prepare, is_wide=run.is_wide),
        update_weights=partial(packing.update, is_wide=run.is_wide),
        unpack=packing.unpack,
    )


@dataclass
class _Room:
    """Parts of a workspace: name -> (offset, bytes), each from a multiple of 256 on."""

    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    total: int = 0

    def add(self, name: str, size: int) -> None:
        self.parts[name] = (self.total, size)
        self.total += -(-size // 256) * 256

    def take(self, workspace: torch.Tensor, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        offset, size = self.parts[name]
        return workspace[offset : offset + size].view(dtype).view(*shape)


class _Run:
    """``run(x, weights, ids, experts, lora=None, out=None, workspace=None)``."""

    def __init__(self, site: Site, ladder: Ladder, is_wide: bool) -> None:
        self._site, self._ladder, self.is_wide = site, ladder, is_wide
        self._slots, self._experts = site.top_k_experts, site.num_local_experts
        self._dtype = torch.float32 if is_wide else torch.bfloat16
        self._converts = not is_wide and site.weight_format not in PLAIN_FORMATS
        largest = max(site.limit, 0.5 / max(site.alpha, 1e-6)) * (site.limit + abs(site.beta))
        self._raise = float(1 << max((int(60000 / largest)).bit_length() - 1, 0)) if self._converts else 1.0
        self._fake = load("moe_experts").fake

    def room(self, tokens: int) -> _Room:
        """What a call of so many tokens needs."""
        site, pairs, room = self._site, tokens * self._slots, _Room()
        width = 4 if self.is_wide else 2
        room.add("numbers", 4 * (power_of_two_above(self._experts) + 1))
        room.add("items", 16 * (min(self._experts, pairs) + pairs // 16 + 1))
        room.add("order", 4 * pairs)
        room.add("ranks", 4 * pairs)
        if self._converts:
            room.add("wide", 2 * tokens * packing.padded(site.hidden_size))
            room.add("x_factor", 4 * tokens)
        room.add("hidden", width * pairs * packing.padded(site.intermediate_size))
        room.add("parts", 4 * pairs * site.hidden_size)
        return room

    def _tuning(self, pairs: int) -> Tuning:
        return next(t for most, t in self._ladder if pairs <= most * self._experts or most == float("inf"))

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        experts: Packed,
        lora: ExpertLoRA | None = None,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result = self._fake(x, weights, ids, experts) if out is None else out
        tokens = len(x)
        if tokens == 0:
            return result
        assert workspace is not None
        room, pairs = self.room(tokens), tokens * self._slots
        tuning, early = self._tuning(pairs), programmatic(x.device)
        take = partial(room.take, workspace)
        numbers = take("numbers", torch.int32, -1)
        counts, total = numbers[:-1], numbers[-1:]
        items, order = take("items", torch.int32, -1), take("order", torch.int32, -1)
        wide = take("wide", torch.float16, tokens, -1) if self._converts else None
        x_factor = take("x_factor", torch.float32, -1) if self._converts else None
        work = (items, total, order)
        self._begin(x, ids, wide, x_factor, work, take("ranks", torch.int32, -1), counts, tuning, early)
        hidden = take("hidden", torch.float16 if self._converts else self._dtype, pairs, -1)
        parts = take("parts", torch.float32, pairs, -1)
        given = x if wide is None else wide
        count = min(self._experts, pairs) + pairs // tuning.tokens
        self._up(given, x_factor, experts.w13, work, hidden, tuning, count, early)
        self._down(hidden, experts.w2, work, weights, parts, tuning, count, early)
        gemm.combine[(tokens, triton.cdiv(parts.shape[1], COLUMNS))](
            parts, ids, ids.stride(), None, result, result.stride(), parts.shape[1], tokens,
            SLOTS=self._slots, COLUMNS=min(COLUMNS, power_of_two_above(parts.shape[1])), EARLY=early, num_warps=4,
            **after(early),
        )  # fmt: skip
        return result

    def _begin(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        wide: torch.Tensor | None,
        x_factor: torch.Tensor | None,
        work: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        ranks: torch.Tensor,
        counts: torch.Tensor,
        tuning: Tuning,
        early: bool,
    ) -> None:
        tokens, pairs = len(x), len(x) * self._slots
        items, total, order = work
        alone = pairs <= align.SORTED_ALONE
        if not alone:
            counts.zero_()
        sorters = 1 if alone else triton.cdiv(pairs, align.PAIRS)
        padded = 0 if wide is None else wide.shape[1]
        shared = {"SLOTS": self._slots, "EXPERTS": len(counts), "PAIRS": align.PAIRS, "BT": tuning.tokens}
        align.begin[(sorters + (0 if wide is None else tokens),)](
            x, x.stride(), wide, x_factor, ids, ids.stride(), order, items, total, ranks, counts,
            tokens, pairs, sorters, x.shape[1], padded,
            **shared, ALL=max(power_of_two_above(pairs), 16) if alone else 0, WIDE=power_of_two_above(max(padded, 64)),
            FOUR_BIT=self._site.weight_format in ("mxfp4", "nvfp4"), EARLY=early and alone, num_warps=8,
            **after(early and alone),
        )  # fmt: skip
        if not alone:
            align.scatter[(sorters,)](ids, ids.stride(), ranks, counts, order, items, total, pairs, **shared)

    def _common(self, matrix: Matrix, tuning: Tuning, tile: Tile, device: torch.device, early: bool) -> dict[str, Any]:
        """Launch arguments that both products take."""
        compute = tl.float16 if self._converts else tl.float32 if self.is_wide else tl.bfloat16
        return {
            "SLOTS": self._slots,
            "BN": tile.rows,
            "BT": tuning.tokens,
            "BK": tile.depth,
            "FORMAT": self._site.weight_format,
            "COMPUTE": compute,
            "SORTED": True,
            "EVEN": matrix.size % tile.depth == 0,
            "NATIVE": native(device),
            "PRECISION": DOT_PRECISION,
            "STAGES": tile.stages,
            "EARLY": early,
            "num_warps": tile.warps,
            **after(early),
        }

    def _up(
        self,
        x: torch.Tensor,
        x_factor: torch.Tensor | None,
        matrix: Matrix,
        work: tuple[torch.Tensor, ...],
        hidden: torch.Tensor,
        tuning: Tuning,
        count: int,
        early: bool,
    ) -> None:
        site = self._site
        gemm.up[(count * triton.cdiv(matrix.rows, tuning.up.rows),)](
            x, x.stride(), x_factor, matrix.arguments(), *work, hidden, len(x), matrix.size, x.shape[1],
            hidden.shape[1], site.alpha, site.beta, site.limit, RAISE=self._raise,
            **self._common(matrix, tuning, tuning.up, x.device, early),
        )  # fmt: skip

    def _down(
        self,
        hidden: torch.Tensor,
        matrix: Matrix,
        work: tuple[torch.Tensor, ...],
        weights: torch.Tensor,
        parts: torch.Tensor,
        tuning: Tuning,
        count: int,
        early: bool,
    ) -> None:
        gemm.down[(count * triton.cdiv(matrix.rows, tuning.down.rows),)](
            hidden, matrix.arguments(), *work, weights, weights.stride(), parts, len(weights), matrix.size,
            hidden.shape[1], matrix.rows, LOWER=1.0 / self._raise,
            **self._common(matrix, tuning, tuning.down, hidden.device, early),
        )  # fmt: skip


def native(device: torch.device) -> bool:
    """Whether four-bit codes are unpacked by instructions of NVIDIA GPUs."""
    return device.type == "cuda" and torch.version.hip is None
