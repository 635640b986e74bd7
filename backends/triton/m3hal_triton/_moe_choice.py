"""Which way a call of ``moe_experts`` goes: tiles, parts of K, where the shared expert is, and the memory for it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import triton.language as tl

from m3hal.formats import PLAIN_FORMATS
from m3hal.shape import Site
from m3hal_triton import _moe_few as few
from m3hal_triton import _moe_weights as packing
from m3hal_triton import _moe_wide_codes as wide_codes
from m3hal_triton._launch import is_hopper, multiprocessors, power_of_two_above, power_of_two_below
from m3hal_triton._moe_decode import DEPTH
from m3hal_triton._moe_tuning import FIXED, Ladder, Tile, Tuning, Warps, ladder_of
from m3hal_triton._workspace import Room

#: tokens up to which a product may be split along K
SPLIT_TOKENS = 64
MAX_SPLITS = 8
#: tokens of a tile where they are many
WIDE = 128


def native(device: torch.device) -> bool:
    """Whether stored codes are unpacked by instructions of NVIDIA GPUs."""
    return device.type == "cuda" and torch.version.hip is None


def planned_for() -> torch.device:
    """What kernels run on; they are planned before there are tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_packed(format: str) -> bool:
    """Two codes to a byte, whose order of columns is another than that of bytes."""
    return format in ("mxfp4", "nvfp4")


@dataclass(frozen=True)
class Choice:
    """What a site and a ladder of tunings decide. rounds: activations are in FP8. warps: tiles of four-bit weights for
    one to three tokens, if any."""

    site: Site
    ladder: Ladder
    rounds: bool = False
    warps: tuple[Warps, Warps] | None = None

    @cached_property
    def is_fp32(self) -> bool:
        return self.site.dtype == "float32"

    @cached_property
    def in_order(self) -> bool:
        """Whether products walk K as it lies."""
        return self.is_fp32 or self.rounds

    @cached_property
    def slots(self) -> int:
        return self.site.top_k_experts

    @cached_property
    def experts(self) -> int:
        return self.site.num_local_experts

    @cached_property
    def shared_ladder(self) -> Ladder:
        """Of the shared expert in launches of its own."""
        site = self.site
        if site.shared_format in ("", site.weight_format) or self.in_order or self.ladder is FIXED:
            return self.ladder
        other = replace(site, weight_format=site.shared_format)
        return ladder_of(other, rounds=False, is_nvidia=native(planned_for()))

    @cached_property
    def stored(self) -> str:
        """The first format of routed and shared experts that is not a plain one; empty: both are."""
        site = self.site
        formats = [site.weight_format] + ([site.shared_format] if site.shared_intermediate_size else [])
        return next((f for f in formats if f not in PLAIN_FORMATS), "")

    @cached_property
    def converts(self) -> bool:
        """Whether products take tokens in fp16."""
        return not self.in_order and bool(self.stored)

    @cached_property
    def lift(self) -> float:
        """A power of two that brings the largest hidden activation towards the end of fp16's range."""
        site = self.site
        largest = max(site.limit, 0.5 / max(site.alpha, 1e-6)) * (site.limit + abs(site.beta))
        return float(1 << max(int(60000 / largest).bit_length() - 1, 0))

    def compute(self, format: str) -> tl.dtype:
        """The dtype of products with weights of a format."""
        if self.rounds:
            return tl.float8e4nv
        if self.is_fp32:
            return tl.float32
        return tl.bfloat16 if format in PLAIN_FORMATS else tl.float16

    def tuning(self, pairs: int) -> Tuning:
        """Of so many pairs of a token and an expert."""
        return next(tuning for most, tuning in self.ladder if pairs <= most * self.experts)

    def joins(self, tokens: int) -> bool:
        """Whether the shared expert would be one more that every token chose, in the same launches.

        That is one of many work items where tokens are few or many. In between they make several items of it, while
        tiles are as the other experts' fewer tokens want them: launches of its own, in tiles of its own.
        """
        site, tile = self.site, self.tuning(tokens * self.slots).tokens
        is_alike = site.shared_intermediate_size == site.intermediate_size and site.shared_format == site.weight_format
        is_plain = not self.rounds and not site.lora_rank and self.ladder is not FIXED
        return is_alike and is_plain and (tokens <= tile or tile >= WIDE)

    def is_few(self, tokens: int, joined: bool = False) -> bool:
        """Whether programs find their items themselves."""
        pairs, site = tokens * (self.slots + joined), self.site
        is_plain = not self.in_order and not site.lora_rank and joined == (site.shared_intermediate_size > 0)
        return is_plain and pairs <= few.PAIRS and self.ladder is not FIXED

    def splits(self, pairs: int) -> tuple[int, int]:
        """Parts of K in both products."""
        site, tuning = self.site, self.tuning(pairs)
        inner = self.padded(site.intermediate_size, site.weight_format)
        return (
            self._splits(pairs, tuning.up, 2 * inner, site.hidden_size),
            self._splits(pairs, tuning.down, site.hidden_size, site.intermediate_size),
        )

    def _splits(self, pairs: int, tile: Tile, rows: int, size: int) -> int:
        """Parts of K, so that few experts still fill the GPU."""
        if not tile.programs or pairs > SPLIT_TOKENS * self.slots:
            return 1
        programs = min(self.experts, pairs) * -(-rows // tile.rows)
        target = tile.programs * multiprocessors(planned_for())
        return max(min(target // programs, -(-size // tile.depth) // 2, MAX_SPLITS), 1)

    def parts(self, pairs: int, tile: Tile, matrix: packing.Matrix) -> int:
        """Parts of K that a program of few pairs multiplies beside one another, with fewer rows for each."""
        most = min(self._splits(pairs, tile, matrix.rows, matrix.size), tile.rows // few.LEAST_ROWS)
        step = max(tile.depth, DEPTH.value if matrix.in_pieces else 1)
        parts = power_of_two_below(max(most, 1))
        while matrix.size % (parts * step) and parts > 1:
            parts //= 2
        return parts

    def halves(self, pairs: int) -> bool:
        """Whether w2's outputs wait for their sum in fp16: where they are so many that they come from memory.

        Blackwell's sums lie in memory of their own, and what finds the largest of them would spill registers.
        """
        is_plain = not self.is_fp32 and not self.site.lora_rank and self.tuning(pairs).tokens >= WIDE
        return is_plain and (is_hopper(planned_for()) or not native(planned_for()))

    def padded(self, size: int, format: str) -> int:
        """Numbers that a row of activations has."""
        return packing.padded(size, packing.order_of(format, in_order=self.in_order))

    def largest_batches(self) -> set[int]:
        """Tokens of the batches among which the one is that needs most memory: each tuning's last, and few."""
        site = self.site
        found = {*range(1, SPLIT_TOKENS + 1), site.max_tokens}
        for most, _ in self.ladder[:-1]:
            for slots, experts in itertools.product(range(self.slots, self.slots + 2), range(2)):
                last = int(most * (self.experts + experts)) // slots
                found |= {last - 1, last, last + 1}
        return {tokens for tokens in found if 0 < tokens <= site.max_tokens}

    def room(self, tokens: int, joined: bool = False) -> Room:
        """What a call of so many tokens needs."""
        site, pairs, room = self.site, tokens * (self.slots + joined), Room()
        up, down = self.splits(pairs)
        inner, width = self.padded(site.intermediate_size, site.weight_format), 4 if self.is_fp32 else 2
        items = min(self.experts + joined, pairs) + pairs // 8 + 1
        room.add("numbers", 4 * (power_of_two_above(self.experts + joined) + 1))
        room.add("items", 16 * items)
        room.add("ready", 4 * items)
        room.add("order", 4 * pairs)
        room.add("positions", 4 * pairs)
        self._add_activations(room, tokens, pairs, inner)
        room.add("hidden", width * pairs * inner)
        if up > 1 or site.lora_rank:
            room.add("raw", 8 * up * pairs * inner)
        if self.halves(pairs):
            room.add("parts", 2 * pairs * site.hidden_size)
            rows = min(self.tuning(pairs).down.rows, wide_codes.HALF.value)
            room.add("powers", 4 * pairs * -(-site.hidden_size // rows))
        else:
            room.add("parts", 4 * down * pairs * site.hidden_size)
        if site.lora_rank:
            room.add("low", 4 * pairs * site.lora_rank)
        if site.shared_intermediate_size and not joined:
            inner = self.padded(site.shared_intermediate_size, site.shared_format)
            room.add("shared_hidden", width * tokens * inner)
            room.add("shared_parts", 4 * tokens * site.hidden_size)
        return room

    def _add_activations(self, room: Room, tokens: int, pairs: int, inner: int) -> None:
        """Copies of them in what products take."""
        site = self.site
        if self.converts:
            formats = (site.weight_format, site.shared_format or site.weight_format)
            room.add("wide", 2 * tokens * max(self.padded(site.hidden_size, format) for format in formats))
            room.add("x_factor", 4 * tokens)
        if self.rounds:
            room.add("x_codes", tokens * site.hidden_size)
            room.add("x_factor", 4 * tokens)
            room.add("hidden_codes", pairs * inner)
            room.add("hidden_factor", 4 * pairs)
