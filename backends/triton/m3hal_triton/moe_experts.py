"""``moe_experts``: each token's chosen experts, weighted and summed in fp32, and the expert that all tokens share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from m3hal_triton import _moe_combine as ends
from m3hal_triton import _moe_few as few
from m3hal_triton import _moe_gemm as gemm
from m3hal_triton import _moe_lora as low_rank
from m3hal_triton import _moe_one as one
from m3hal_triton import _moe_weights as packing
from m3hal_triton import _moe_wide as wide
from m3hal_triton import _moe_wide_codes as wide_codes
from m3hal_triton._launch import (
    DOT_PRECISION,
    after,
    is_hopper,
    multiprocessors,
    power_of_two_above,
    programmatic,
)
from m3hal_triton._moe_tuning import BY_WARPS, FIXED, NARROW, Ladder, Tile, Tuning, Warps, by_warps, ladder_of
from m3hal_triton._moe_weights import Matrix, Packed
from m3hal_triton._workspace import Memory, Room
from m3hal_triton.quantize import quantize_rows

#: columns of one program of the sum, and of four of the activation
COLUMNS = 2048
#: the same, where the sum's programs would be fewer than so many for each multiprocessor
LEAST_COLUMNS, SUMMERS = 256, 4
#: tokens up to which a product may be split along K
SPLIT_TOKENS = 64
MAX_SPLITS = 8
#: tokens of a tile where they are many
WIDE = 128
#: tokens of a tile up to which those that an item hasn't are not read
MASKED = 32
#: rows of one program of an adapter's second product, and columns of one step of its first
LORA_ROWS, LORA_COLUMNS = 64, 256


def moe_experts(site: Site) -> Kernel:
    """The kernel for a site: tiles are chosen by the number of tokens."""
    is_nvidia = native(_device())
    ladder, warps = ladder_of(site, rounds=False, is_nvidia=is_nvidia), by_warps(site, is_nvidia=is_nvidia)
    return _kernel(site, ladder, warps=warps)


def batch_invariant(site: Site) -> Kernel:
    """The same, where a token has the same bits alone and in any batch: one tile for all, and no splits."""
    return _kernel(site, NARROW if site.dtype == "float32" else FIXED)


def fp8_activations(site: Site) -> Kernel:
    """FP8 weights times activations rounded to FP8, with a scale for each row: hidden ones by way of bf16."""
    return _kernel(site, ladder_of(site, rounds=True, is_nvidia=native(_device())), rounds=True)


def _kernel(site: Site, ladder: Ladder, *, rounds: bool = False, warps: tuple[Warps, Warps] | None = None) -> Kernel:
    run = _Run(site, ladder, rounds=rounds, warps=warps)
    return Kernel(
        run=run,
        workspace_bytes=max(
            run.room(tokens, joined).total for tokens in run.largest_batches() for joined in {False, run.joins(tokens)}
        ),
        prepare_weights=partial(packing.prepare, in_order=run.in_order),
        update_weights=partial(packing.update, in_order=run.in_order),
        unpack=packing.unpack,
    )


@dataclass(frozen=True)
class _Batch:
    """One call: its tensors, parts of the workspace, and how it is tiled."""

    x: torch.Tensor
    ids: torch.Tensor
    given: torch.Tensor  # activations as the product takes them
    x_factor: torch.Tensor | None
    items: torch.Tensor | None
    total: torch.Tensor | None
    order: torch.Tensor | None
    hidden: torch.Tensor
    hidden_factor: torch.Tensor | None
    raw: torch.Tensor | None
    parts: torch.Tensor
    powers: torch.Tensor | None  # what tiles of parts in fp16 are multiplied by
    count: int  # work items at most
    format: str
    compute: tl.dtype
    slots: int
    shared: int  # number of the shared expert, which is each token's last; -1: it is none of these, or there is none
    tuning: Tuning
    splits: tuple[int, int]
    early: bool
    native: bool
    is_hopper: bool
    ready: torch.Tensor | None  # where w2's programs wait for their item alone: how much of it w13's have stored

    @property
    def lift(self) -> bool:
        return bool(self.compute == tl.float16)


class _Run:
    """``run(x, weights, ids, experts, lora=None, out=None, workspace=None)``."""

    def __init__(
        self, site: Site, ladder: Ladder, *, rounds: bool = False, warps: tuple[Warps, Warps] | None = None
    ) -> None:
        self._site, self._ladder, self._rounds, self._warps = site, ladder, rounds, warps
        self._is_wide = site.dtype == "float32"
        self.in_order = self._is_wide or rounds  # products walk K as it lies
        self._shared_ladder = ladder
        if site.shared_format not in ("", site.weight_format) and not self.in_order and ladder is not FIXED:
            other = replace(site, weight_format=site.shared_format)
            self._shared_ladder = ladder_of(other, rounds=False, is_nvidia=native(_device()))
        self._slots, self._experts = site.top_k_experts, site.num_local_experts
        formats = [site.weight_format] + ([site.shared_format] if site.shared_intermediate_size else [])
        self._stored = next((f for f in formats if f not in PLAIN_FORMATS), "")
        self._converts = not self.in_order and bool(self._stored)
        # the largest hidden activation, brought towards the end of fp16's range
        largest = max(site.limit, 0.5 / max(site.alpha, 1e-6)) * (site.limit + abs(site.beta))
        self._raise = float(1 << max(int(60000 / largest).bit_length() - 1, 0))
        self._fake = load("moe_experts").fake

    def _compute(self, format: str) -> tl.dtype:
        if self._rounds:
            return tl.float8e4nv
        if self._is_wide:
            return tl.float32
        return tl.bfloat16 if format in PLAIN_FORMATS else tl.float16

    def joins(self, tokens: int) -> bool:
        """Whether the shared expert would be one more that every token chose, in the same launches.

        That is one of many work items where tokens are few or many. In between they make several items of it, while
        tiles are as the other experts' fewer tokens want them: launches of its own, in tiles of its own.
        """
        site, tile = self._site, self._tuning(tokens * self._slots).tokens
        is_alike = site.shared_intermediate_size == site.intermediate_size and site.shared_format == site.weight_format
        is_plain = not self._rounds and not site.lora_rank and self._ladder is not FIXED
        return is_alike and is_plain and (tokens <= tile or tile >= WIDE)

    def _tuning(self, pairs: int, experts: int = 0) -> Tuning:
        return next(tuning for most, tuning in self._ladder if pairs <= most * (experts or self._experts))

    def largest_batches(self) -> set[int]:
        """Tokens of the batches among which the one is that needs most memory: each tuning's last, and few."""
        site = self._site
        found = {*range(1, SPLIT_TOKENS + 1), site.max_tokens}
        for most, _ in self._ladder[:-1]:
            for slots, experts in itertools.product(range(self._slots, self._slots + 2), range(2)):
                last = int(most * (self._experts + experts)) // slots
                found |= {last - 1, last, last + 1}
        return {tokens for tokens in found if 0 < tokens <= site.max_tokens}

    def _splits(self, pairs: int, tile: Tile, rows: int, size: int) -> int:
        """Parts of K, so that few experts still fill the GPU."""
        if not tile.programs or pairs > SPLIT_TOKENS * self._slots:
            return 1
        programs = min(self._experts, pairs) * -(-rows // tile.rows)
        target = tile.programs * multiprocessors(_device())
        return max(min(target // programs, -(-size // tile.depth) // 2, MAX_SPLITS), 1)

    def _halves(self, pairs: int) -> bool:
        """Whether w2's outputs wait for their sum in fp16: where they are so many that they come from memory.

        Blackwell's sums lie in memory of their own, and what finds the largest of them would spill registers.
        """
        is_plain = not self._is_wide and not self._site.lora_rank and self._tuning(pairs).tokens >= WIDE
        return is_plain and (is_hopper(_device()) or not native(_device()))

    def _power_rows(self, batch: _Batch, matrix: Matrix) -> int:
        """Of w2, for whose outputs of a token there is one power of two."""
        if wide.takes(batch, matrix, batch.hidden):
            return int(wide.ROWS.value)
        return int(wide_codes.HALF.value) if wide_codes.takes_down(batch, matrix) else batch.tuning.down.rows

    def _both_splits(self, pairs: int) -> tuple[int, int]:
        site, tuning = self._site, self._tuning(pairs)
        inner = self._padded(site.intermediate_size, site.weight_format)
        return (
            self._splits(pairs, tuning.up, 2 * inner, site.hidden_size),
            self._splits(pairs, tuning.down, site.hidden_size, site.intermediate_size),
        )

    def _padded(self, size: int, format: str) -> int:
        return packing.padded(size, packing.order_of(format, in_order=self.in_order))

    def room(self, tokens: int, joined: bool = False) -> Room:
        """What a call of so many tokens needs."""
        site, pairs, room = self._site, tokens * (self._slots + joined), Room()
        up, down = self._both_splits(pairs)
        inner, width = self._padded(site.intermediate_size, site.weight_format), 4 if self._is_wide else 2
        room.add("numbers", 4 * (power_of_two_above(self._experts + joined) + 1))
        room.add("items", 16 * (min(self._experts + joined, pairs) + pairs // 8 + 1))
        room.add("ready", 4 * (min(self._experts + joined, pairs) + pairs // 8 + 1))
        room.add("order", 4 * pairs)
        room.add("positions", 4 * pairs)
        if self._is_few(tokens, joined):
            tuning = self._tuning(pairs)
            tiles = -(-2 * inner // tuning.up.rows) * pairs + -(-site.hidden_size // tuning.down.rows)
            own = site.hidden_size // self._warps[1].rows if self._warps else 0
            room.add("counters", 4 * max(tiles, own))
        if self._converts:
            formats = (site.weight_format, site.shared_format or site.weight_format)
            room.add("wide", 2 * tokens * max(self._padded(site.hidden_size, format) for format in formats))
            room.add("x_factor", 4 * tokens)
        if self._rounds:
            room.add("x_codes", tokens * site.hidden_size)
            room.add("x_factor", 4 * tokens)
            room.add("hidden_codes", pairs * inner)
            room.add("hidden_factor", 4 * pairs)
        room.add("hidden", width * pairs * inner)
        if up > 1 or site.lora_rank:
            room.add("raw", 8 * up * pairs * inner)
        if self._halves(pairs):
            room.add("parts", 2 * pairs * site.hidden_size)
            rows = min(self._tuning(pairs).down.rows, wide_codes.HALF.value)
            room.add("powers", 4 * pairs * -(-site.hidden_size // rows))
        else:
            room.add("parts", 4 * down * pairs * site.hidden_size)
        if site.lora_rank:
            room.add("low", 4 * pairs * site.lora_rank)
        if site.shared_intermediate_size and not joined:
            inner = self._padded(site.shared_intermediate_size, site.shared_format)
            room.add("shared_hidden", width * tokens * inner)
            room.add("shared_parts", 4 * tokens * site.hidden_size)
        return room

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
        if len(x) == 0:
            return result
        if lora is not None and not self._site.lora_rank:
            raise ValueError("this site says that it has no adapters (lora_rank 0); plan it with their rank")
        assert workspace is not None
        joined = experts.joined and self.joins(len(x))
        memory = Memory(self.room(len(x), joined), workspace)
        positions = memory.take("positions", torch.int32, -1)
        batch = self._batch(x, ids, experts, memory, joined=joined)
        if self._is_few(len(x), joined):
            if self._warps and len(batch.hidden) <= BY_WARPS:
                return self._one(batch, experts, memory, weights, result, self._warps)
            return self._few(batch, experts, memory, weights, result)
        self._begin(batch, memory, positions)
        if self._rounds:
            assert batch.x_factor is not None
            quantize_rows(x, batch.given, batch.x_factor, experts.x_scale)
        self._up(batch, experts.w13, positions if lora is not None else None, lora, memory)
        if self._rounds:
            factor = memory.take("hidden_factor", torch.float32, -1)
            codes = memory.take("hidden_codes", torch.float8_e4m3fn, len(batch.hidden), -1)
            quantize_rows(batch.hidden, codes, factor, experts.hidden_scale)
            batch = replace(batch, hidden=codes, hidden_factor=factor)
        self._down(batch, experts.w2)
        if lora is not None:
            self._adapt(batch, lora, positions, memory, experts, is_first=False)
        shared = None if joined else self._shared(batch, experts, memory)
        width = batch.parts.shape[-1]
        share = len(x) * width // (SUMMERS * multiprocessors(x.device))
        columns = max(LEAST_COLUMNS, min(COLUMNS, power_of_two_above(max(share, 1))))
        ends.combine[(len(x), triton.cdiv(width, columns))](
            batch.parts, positions, len(batch.hidden), ids, ids.stride(), weights, weights.stride(), shared, result,
            result.stride(), width, SLOTS=batch.slots, LAST=joined, SPLITS=batch.splits[1],
            COLUMNS=columns, powers=batch.powers, WIDTH=self._power_rows(batch, experts.w2), EARLY=batch.early,
            num_warps=4, **after(batch.early),
        )  # fmt: skip
        return result

    def _batch(self, x: torch.Tensor, ids: torch.Tensor, experts: Packed, memory: Memory, *, joined: bool) -> _Batch:
        pairs, format = len(x) * (self._slots + joined), packing.format_of_matrix(experts.w13, x)
        tuning, compute = self._tuning(pairs), self._compute(format)
        numbers, splits = memory.take("numbers", torch.int32, -1), self._both_splits(pairs)
        has_wide, early = compute == tl.float16, programmatic(x.device)
        waits_for_one = early and splits[0] == 1 and tuning.tokens < WIDE and not self._rounds
        return _Batch(
            x=x,
            ids=ids,
            given=self._given(x, memory, has_wide=has_wide),
            x_factor=memory.find("x_factor", torch.float32, -1) if has_wide or self._rounds else None,
            items=memory.take("items", torch.int32, -1),
            total=numbers[-1:],
            order=memory.take("order", torch.int32, -1),
            hidden=memory.take("hidden", torch.float16 if has_wide else x.dtype, pairs, -1),
            hidden_factor=None,
            raw=memory.find("raw", torch.float32, splits[0], pairs, -1),
            parts=memory.take("parts", torch.float16 if self._halves(pairs) else torch.float32, splits[1], pairs, -1),
            powers=memory.find("powers", torch.float32, pairs, -1),
            count=min(self._experts + joined, pairs) + pairs // tuning.most,
            format=format,
            compute=compute,
            slots=self._slots + joined,
            shared=self._experts if joined else -1,
            tuning=tuning,
            splits=splits,
            early=early,
            native=native(x.device),
            is_hopper=is_hopper(x.device),
            ready=memory.take("ready", torch.int32, -1) if waits_for_one and not self._site.lora_rank else None,
        )

    def _given(self, x: torch.Tensor, memory: Memory, *, has_wide: bool) -> torch.Tensor:
        """Where a product finds its activations."""
        if self._rounds:
            return memory.take("x_codes", torch.float8_e4m3fn, len(x), -1)
        return memory.take("wide", torch.float16, len(x), -1) if has_wide else x

    def _is_few(self, tokens: int, joined: bool = False) -> bool:
        """Whether programs find their items themselves."""
        pairs, site = tokens * (self._slots + joined), self._site
        is_plain = not self.in_order and not site.lora_rank and joined == (site.shared_intermediate_size > 0)
        return is_plain and pairs <= few.PAIRS and self._ladder is not FIXED

    def _few(
        self, batch: _Batch, experts: Packed, memory: Memory, weights: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        site, x, ids, w13, w2 = self._site, batch.x, batch.ids, experts.w13, experts.w2
        wide, tuning, (pairs, inner) = memory.find("wide", torch.float16, len(x), -1), batch.tuning, batch.hidden.shape
        counters = memory.take("counters", torch.int32, -1)
        up_tiles, down_tiles = triton.cdiv(w13.rows, tuning.up.rows), triton.cdiv(w2.rows, tuning.down.rows)
        zeros, padded = pairs * up_tiles + down_tiles, 0 if wide is None else wide.shape[1]
        few.begin[(1 if wide is None else 1 + len(x),)](
            x, x.stride(), wide, batch.x_factor, counters, zeros, x.shape[1], padded,
            WIDE=power_of_two_above(max(padded, 64)), FOUR_BIT=_is_packed(self._stored), ZEROS=1024,
            EARLY=batch.early, num_warps=8, **after(batch.early),
        )  # fmt: skip
        lift = self._raise if batch.lift else 1.0
        same = {
            "SLOTS": batch.slots,
            "SHARED": batch.shared,
        }
        few.up[(pairs * batch.splits[0] * up_tiles,)](
            batch.given, batch.given.stride(), batch.x_factor, w13.arguments(), ids, ids.stride(), counters,
            batch.hidden, batch.raw, pairs, w13.size, batch.given.shape[1], inner,
            (site.alpha, site.beta, site.limit), RAISE=lift, **same,
            **self._common(batch, w13, tuning.up, batch.splits[0], is_few=True),
        )  # fmt: skip
        few.down[(pairs * batch.splits[1] * down_tiles,)](
            batch.hidden, w2.arguments(), ids, ids.stride(), weights, weights.stride(),
            counters[pairs * up_tiles :], batch.parts, out, out.stride(), pairs, w2.size, inner, w2.rows,
            TOKENS=power_of_two_above(len(x)), PAIRS=power_of_two_above(pairs), LOWER=1.0 / lift, **same,
            **self._common(batch, w2, tuning.down, batch.splits[1], is_few=True),
        )  # fmt: skip
        return out

    def _one(
        self,
        batch: _Batch,
        experts: Packed,
        memory: Memory,
        weights: torch.Tensor,
        out: torch.Tensor,
        tiles: tuple[Warps, Warps],
    ) -> torch.Tensor:
        """Four-bit weights for BY_WARPS pairs at most."""
        site, x, ids, w13, w2 = self._site, batch.x, batch.ids, experts.w13, experts.w2
        (pairs, inner), (up, down) = batch.hidden.shape, tiles
        counters = memory.take("counters", torch.int32, -1)
        up_tiles, down_tiles = w13.rows // up.rows, w2.rows // down.rows
        tokens = memory.take("wide", torch.float16, len(x), -1)
        few.begin[(1 + len(x),)](
            x, x.stride(), tokens, batch.x_factor, counters, down_tiles, x.shape[1], x.shape[1],
            WIDE=power_of_two_above(x.shape[1]), FOUR_BIT=True, IN_ORDER=True, ZEROS=1024, EARLY=batch.early,
            num_warps=8, **after(batch.early),
        )  # fmt: skip
        one.up[(pairs * up_tiles,)](
            tokens, batch.x_factor, w13.arguments(), ids, ids.stride(), batch.hidden, w13.size, inner,
            (site.alpha, site.beta, site.limit), RAISE=self._raise, **self._by_warps(batch, up),
        )  # fmt: skip
        one.down[(pairs * down_tiles,)](
            batch.hidden, w2.arguments(), ids, ids.stride(), weights, weights.stride(), counters, batch.parts, out,
            out.stride(), pairs, w2.size, inner, w2.rows, TOKENS=power_of_two_above(len(x)),
            PAIRS=power_of_two_above(pairs), LOWER=1.0 / self._raise, **self._by_warps(batch, down),
        )  # fmt: skip
        return out

    def _by_warps(self, batch: _Batch, tile: Warps) -> dict[str, Any]:
        """Launch arguments that both products by warps take."""
        return {
            "SLOTS": batch.slots,
            "SHARED": batch.shared,
            "BN": tile.rows,
            "WARPS": tile.warps,
            "ALONG": tile.along,
            "FORMAT": batch.format,
            "NATIVE": batch.native,
            "EARLY": batch.early,
            "num_warps": tile.warps,
            **({"maxnreg": tile.registers} if tile.registers and batch.is_hopper else {}),
            **after(batch.early),
        }

    def align(self, x: torch.Tensor, ids: torch.Tensor, experts: Packed, workspace: torch.Tensor) -> None:
        """The order of the experts alone, as a call begins with it, for who measures it; few tokens have none."""
        joined = experts.joined and self.joins(len(x))
        if not self._is_few(len(x), joined):
            memory = Memory(self.room(len(x), joined), workspace)
            batch = self._batch(x, ids, experts, memory, joined=joined)
            self._begin(batch, memory, memory.take("positions", torch.int32, -1))

    def _begin(self, batch: _Batch, memory: Memory, positions: torch.Tensor) -> None:
        x, ids = batch.x, batch.ids
        tokens, pairs = len(x), len(batch.hidden)
        wide, counts = memory.find("wide", torch.float16, tokens, -1), memory.take("numbers", torch.int32, -1)[:-1]
        at_once = pairs <= align.AT_ONCE
        if not at_once:
            counts.zero_()
        sorters = align.sorters_of(pairs)
        padded = 0 if wide is None else wide.shape[1]
        early = batch.early and at_once
        same = {"SLOTS": batch.slots, "SHARED": batch.shared, "EXPERTS": len(counts)}
        same |= {"PAIRS": align.PAIRS, "MOST": batch.tuning.most}
        align.begin[(sorters + (0 if wide is None else tokens),)](
            x, x.stride(), wide, memory.find("x_factor", torch.float32, -1), ids, ids.stride(), batch.order,
            batch.items, batch.total, positions, counts, tokens, pairs, sorters, x.shape[1], padded,
            **same, MINE=align.MINE if at_once else 0,
            WIDE=power_of_two_above(max(padded, 64)), FOUR_BIT=_is_packed(self._stored), EARLY=early,
            ready=batch.ready, most=batch.count, num_warps=8, **after(early),
        )  # fmt: skip
        if not at_once:
            align.scatter[(sorters,)](
                ids, ids.stride(), positions, counts, batch.order, batch.items, batch.total, pairs, num_warps=8, **same
            )

    def _convert(self, batch: _Batch, memory: Memory, format: str) -> None:
        """Tokens once more, in the order of another format's products; the routed experts have read theirs."""
        x, wide = batch.x, memory.take("wide", torch.float16, len(batch.x), -1)
        numbers = memory.take("numbers", torch.int32, -1)
        align.begin[(len(x),)](
            x, x.stride(), wide, memory.take("x_factor", torch.float32, -1), batch.ids, batch.ids.stride(), batch.order,
            batch.items, batch.total, batch.order, numbers, len(x), 0, 0, x.shape[1], wide.shape[1],
            SLOTS=self._slots, EXPERTS=16, PAIRS=align.PAIRS, MOST=16, MINE=0, WIDE=power_of_two_above(wide.shape[1]),
            FOUR_BIT=_is_packed(format), EARLY=False, num_warps=8,
        )  # fmt: skip

    def _common(
        self, batch: _Batch, matrix: Matrix, tile: Tile, splits: int, *, is_few: bool = False
    ) -> dict[str, Any]:
        """Launch arguments that both products take."""
        if is_few:
            more: dict[str, Any] = {"BT": few.COLUMNS}
        else:
            more = {"BX": batch.tuning.extra, "BT": batch.tuning.tokens, "SORTED": batch.order is not None}
            more["ready"] = batch.ready
            more["MASKED"] = batch.tuning.tokens <= MASKED or batch.tuning.tokens >= WIDE
        return {
            "BN": tile.rows,
            "BK": tile.depth,
            "SPLITS": splits,
            "FORMAT": batch.format,
            "COMPUTE": batch.compute,
            "EVEN": matrix.size % tile.depth == 0,
            "NATIVE": batch.native * (1 if batch.is_hopper else 2),
            "PRECISION": DOT_PRECISION,
            "STAGES": tile.stages,
            "EARLY": batch.early,
            "num_warps": tile.warps,
            **more,
            **({"maxnreg": tile.registers} if tile.registers and batch.is_hopper else {}),
            **after(batch.early),
        }

    def _up(
        self, batch: _Batch, matrix: Matrix, positions: torch.Tensor | None, lora: ExpertLoRA | None, memory: Memory
    ) -> None:
        """Into ``hidden``; by way of ``raw`` where sums are split or adapters add to them."""
        site, tile, splits = self._site, batch.tuning.up, batch.splits[0]
        numbers = (site.alpha, site.beta, site.limit)
        raw = batch.raw if splits > 1 or lora is not None else None
        lift = self._raise if batch.lift else 1.0
        if wide.takes(batch, matrix, batch.given):
            wide.up(batch, matrix, numbers)
            return
        if raw is None and wide_codes.takes(batch, matrix):
            wide_codes.up(batch, matrix, numbers, lift)
            return
        count, inner = batch.hidden.shape
        gemm.up[(batch.count * splits * triton.cdiv(matrix.rows, tile.rows),)](
            batch.given, batch.given.stride(), batch.x_factor, matrix.arguments(self._rounds), batch.items, batch.total,
            batch.order, batch.hidden, raw, len(batch.x), count, matrix.size, batch.given.shape[1], inner, numbers,
            SLOTS=batch.slots, RAISE=lift, **self._common(batch, matrix, tile, splits),
        )  # fmt: skip
        if lora is not None and positions is not None:
            self._adapt(batch, lora, positions, memory, matrix, is_first=True)
        if raw is not None:
            columns = min(COLUMNS // 4, power_of_two_above(inner))
            early = batch.early and lora is None
            ends.activate[(count, triton.cdiv(inner, columns))](
                raw, batch.hidden, count, inner, numbers, RAISE=lift, SPLITS=splits, COLUMNS=columns, EARLY=early,
                num_warps=4, **after(early),
            )  # fmt: skip

    def _down(self, batch: _Batch, matrix: Matrix) -> None:
        if wide.takes(batch, matrix, batch.hidden):
            wide.down(batch, matrix)
            return
        if wide_codes.takes_down(batch, matrix):
            wide_codes.down(batch, matrix, self._raise)
            return
        tile, splits = batch.tuning.down, batch.splits[1]
        gemm.down[(batch.count * splits * triton.cdiv(matrix.rows, tile.rows),)](
            batch.hidden, batch.hidden_factor, matrix.arguments(self._rounds), batch.items, batch.total, batch.parts,
            batch.powers,
            len(batch.x), len(batch.hidden), matrix.size, batch.hidden.shape[1], matrix.rows,
            LOWER=1.0 / self._raise if batch.lift else 1.0,
            arrivals=triton.cdiv(2 * batch.hidden.shape[1], batch.tuning.up.rows),
            **self._common(batch, matrix, tile, splits),
        )  # fmt: skip

    def _shared(self, batch: _Batch, experts: Packed, memory: Memory) -> torch.Tensor | None:
        """fp32 [T, H]: the shared expert's output; None without one."""
        if experts.shared is None:
            return None
        tokens, format = len(batch.x), packing.format_of_matrix(experts.shared.w13, batch.x)
        compute = self._compute(format)
        tuning = next(tuning for most, tuning in self._shared_ladder if len(batch.x) <= most)
        has_wide = compute == tl.float16
        if has_wide and _is_packed(format) != _is_packed(self._stored):
            self._convert(batch, memory, format)
        own = replace(
            batch,
            given=self._given(batch.x, memory, has_wide=has_wide),
            x_factor=memory.find("x_factor", torch.float32, -1) if has_wide else None,
            items=None,
            total=None,
            ready=None,
            order=None,
            hidden=memory.take("shared_hidden", torch.float16 if has_wide else batch.x.dtype, tokens, -1),
            raw=None,
            parts=memory.take("shared_parts", torch.float32, 1, tokens, -1),
            powers=None,
            count=triton.cdiv(tokens, tuning.most),
            format=format,
            compute=compute,
            tuning=tuning,
            slots=1,
            shared=-1,
            splits=(1, 1),
        )
        self._up(own, experts.shared.w13, None, None, memory)
        self._down(own, experts.shared.w2)
        return own.parts[0]

    def _adapt(
        self, batch: _Batch, lora: ExpertLoRA, positions: torch.Tensor, memory: Memory, packed: Any, *, is_first: bool
    ) -> None:
        """Adds the adapters' part to the sums of a product; the first split takes it."""
        pairs = len(batch.hidden)
        rank, low = lora.a13.shape[2], memory.take("low", torch.float32, pairs, -1)
        sums = batch.parts if batch.raw is None or not is_first else batch.raw
        if is_first:
            inputs, features, a, b, order, factor = batch.x, None, lora.a13, lora.b13, packed.order, 1.0
        else:
            inputs, features, a, b, order = batch.hidden, packed.w13.order, lora.a2, lora.b2, None
            factor = 1.0 / self._raise if batch.lift else 1.0
        same = {"SLOTS": self._slots, "RANK": power_of_two_above(rank)}
        whose: Sequence[Any] = (lora.adapters, lora.adapters.stride(0), batch.ids, batch.ids.stride(), positions)
        low_rank.shrink[(pairs,)](
            inputs, inputs.stride(), features, a, a.stride(), *whose, low, a.shape[3], inputs.shape[1], rank, factor,
            **same, COLUMNS=LORA_COLUMNS,
        )  # fmt: skip
        height = sums.shape[-1]
        low_rank.expand[(pairs, triton.cdiv(height, LORA_ROWS))](
            low, b, b.stride(), lora.scales, lora.scales.stride(0), *whose, order, sums, b.shape[2], height, rank,
            **same, ROWS=LORA_ROWS,
        )  # fmt: skip


def _is_packed(format: str) -> bool:
    """Two codes to a byte, whose order of columns is another than that of bytes."""
    return format in ("mxfp4", "nvfp4")


def native(device: torch.device) -> bool:
    """Whether stored codes are unpacked by instructions of NVIDIA GPUs."""
    return device.type == "cuda" and torch.version.hip is None


def _device() -> torch.device:
    """What kernels run on; they are planned before there are tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
