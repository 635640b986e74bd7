"""Launches of ``moe_experts`` where pairs of a token and an expert are sorted: the order, both products, the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from m3hal.ops import ExpertLoRA
from m3hal_triton import _moe_align as align
from m3hal_triton import _moe_combine as ends
from m3hal_triton import _moe_few as few
from m3hal_triton import _moe_gemm as gemm
from m3hal_triton import _moe_lora as low_rank
from m3hal_triton import _moe_wide as wide
from m3hal_triton import _moe_wide_codes as wide_codes
from m3hal_triton._launch import DOT_PRECISION, after, multiprocessors, power_of_two_above
from m3hal_triton._moe_batch import Batch
from m3hal_triton._moe_choice import WIDE, is_packed
from m3hal_triton._moe_tuning import Tile
from m3hal_triton._moe_weights import Matrix

#: columns of one program of the sum, and of four of the activation
COLUMNS = 2048
#: the same, where the sum's programs would be fewer than so many for each multiprocessor
LEAST_COLUMNS, SUMMERS = 256, 4
#: tokens of a tile up to which those that an item hasn't are not read
MASKED = 32
#: rows of one program of an adapter's second product, and columns of one step of its first
LORA_ROWS, LORA_COLUMNS = 64, 256


def sort(batch: Batch) -> None:
    """The order of the pairs by their experts, and tokens in fp16."""
    x, ids, memory, positions = batch.x, batch.ids, batch.memory, batch.positions
    tokens, pairs = len(x), len(batch.hidden)
    converted, counts = memory.find("wide", torch.float16, tokens, -1), memory.take("numbers", torch.int32, -1)[:-1]
    at_once = pairs <= align.AT_ONCE
    if not at_once:
        counts.zero_()
    sorters = align.sorters_of(pairs)
    padded = 0 if converted is None else converted.shape[1]
    early = batch.early and at_once
    same = {"SLOTS": batch.slots, "SHARED": batch.shared, "EXPERTS": len(counts)}
    same |= {"PAIRS": align.PAIRS, "MOST": batch.tuning.most}
    align.begin[(sorters + (0 if converted is None else tokens),)](
        x, x.stride(), converted, memory.find("x_factor", torch.float32, -1), ids, ids.stride(), batch.order,
        batch.items, batch.total, positions, counts, tokens, pairs, sorters, x.shape[1], padded,
        **same, MINE=align.MINE if at_once else 0,
        WIDE=power_of_two_above(max(padded, 64)), FOUR_BIT=is_packed(batch.choice.stored), EARLY=early,
        ready=batch.ready, most=batch.count, num_warps=8, **after(early),
    )  # fmt: skip
    if not at_once:
        align.scatter[(sorters,)](
            ids, ids.stride(), positions, counts, batch.order, batch.items, batch.total, pairs, num_warps=8, **same
        )


def convert(batch: Batch, format: str) -> None:
    """Tokens once more, in the order of another format's products; the routed experts have read theirs."""
    x, memory = batch.x, batch.memory
    converted, numbers = memory.take("wide", torch.float16, len(x), -1), memory.take("numbers", torch.int32, -1)
    align.begin[(len(x),)](
        x, x.stride(), converted, memory.take("x_factor", torch.float32, -1), batch.ids, batch.ids.stride(),
        batch.order, batch.items, batch.total, batch.order, numbers, len(x), 0, 0, x.shape[1], converted.shape[1],
        SLOTS=batch.choice.slots, EXPERTS=16, PAIRS=align.PAIRS, MOST=16, MINE=0,
        WIDE=power_of_two_above(converted.shape[1]), FOUR_BIT=is_packed(format), EARLY=False, num_warps=8,
    )  # fmt: skip


def common(batch: Batch, matrix: Matrix, tile: Tile, splits: int, *, is_few: bool = False) -> dict[str, Any]:
    """Launch arguments that both products take. splits: parts of K, or of a tile of few tokens."""
    if is_few:
        more: dict[str, Any] = {"BT": few.COLUMNS}
    else:
        more = {"BX": batch.tuning.extra, "BT": batch.tuning.tokens, "SORTED": batch.order is not None}
        more["ready"] = batch.ready
        more["MASKED"] = batch.tuning.tokens <= MASKED or batch.tuning.tokens >= WIDE
    return {
        "BN": tile.rows,
        "BK": tile.depth,
        "PARTS" if is_few else "SPLITS": splits,
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


def up(batch: Batch, matrix: Matrix, lora: ExpertLoRA | None = None) -> None:
    """Into ``hidden``; by way of ``raw`` where sums are split or adapters add to them."""
    choice, tile, splits = batch.choice, batch.tuning.up, batch.splits[0]
    numbers = (choice.site.alpha, choice.site.beta, choice.site.limit)
    raw = batch.raw if splits > 1 or lora is not None else None
    if wide.takes(batch, matrix, batch.given):
        wide.up(batch, matrix, numbers)
        return
    if raw is None and wide_codes.takes(batch, matrix):
        wide_codes.up(batch, matrix, numbers, batch.raised)
        return
    count, inner = batch.hidden.shape
    gemm.up[(batch.count * splits * triton.cdiv(matrix.rows, tile.rows),)](
        batch.given, batch.given.stride(), batch.x_factor, matrix.arguments(choice.rounds), batch.items, batch.total,
        batch.order, batch.hidden, raw, len(batch.x), count, matrix.size, batch.given.shape[1], inner, numbers,
        SLOTS=batch.slots, RAISE=batch.raised, **common(batch, matrix, tile, splits),
    )  # fmt: skip
    if lora is not None:
        adapt(batch, lora, matrix.order, is_first=True)
    if raw is not None:
        columns = min(COLUMNS // 4, power_of_two_above(inner))
        early = batch.early and lora is None
        ends.activate[(count, triton.cdiv(inner, columns))](
            raw, batch.hidden, count, inner, numbers, RAISE=batch.raised, SPLITS=splits, COLUMNS=columns, EARLY=early,
            num_warps=4, **after(early),
        )  # fmt: skip


def down(batch: Batch, matrix: Matrix) -> None:
    """Into ``parts``, and ``powers`` where those are fp16."""
    if wide.takes(batch, matrix, batch.hidden):
        wide.down(batch, matrix)
        return
    if wide_codes.takes_down(batch, matrix):
        wide_codes.down(batch, matrix, batch.choice.lift)
        return
    tile, splits = batch.tuning.down, batch.splits[1]
    gemm.down[(batch.count * splits * triton.cdiv(matrix.rows, tile.rows),)](
        batch.hidden, batch.hidden_factor, matrix.arguments(batch.choice.rounds), batch.items, batch.total, batch.parts,
        batch.powers,
        len(batch.x), len(batch.hidden), matrix.size, batch.hidden.shape[1], matrix.rows,
        LOWER=1.0 / batch.raised,
        arrivals=triton.cdiv(2 * batch.hidden.shape[1], batch.tuning.up.rows),
        **common(batch, matrix, tile, splits),
    )  # fmt: skip


def adapt(batch: Batch, lora: ExpertLoRA, order: torch.Tensor | None, *, is_first: bool) -> None:
    """Adds the adapters' part to the sums of a product; the first split takes it. order: of w13's rows."""
    pairs = len(batch.hidden)
    rank, low = lora.a13.shape[2], batch.memory.take("low", torch.float32, pairs, -1)
    sums = batch.parts if batch.raw is None or not is_first else batch.raw
    if is_first:
        inputs, features, a, b, rows, factor = batch.x, None, lora.a13, lora.b13, order, 1.0
    else:
        inputs, features, a, b, rows, factor = batch.hidden, order, lora.a2, lora.b2, None, 1.0 / batch.raised
    same = {"SLOTS": batch.choice.slots, "RANK": power_of_two_above(rank)}
    whose: Sequence[Any] = (lora.adapters, lora.adapters.stride(0), batch.ids, batch.ids.stride(), batch.positions)
    low_rank.shrink[(pairs,)](
        inputs, inputs.stride(), features, a, a.stride(), *whose, low, a.shape[3], inputs.shape[1], rank, factor,
        **same, COLUMNS=LORA_COLUMNS,
    )  # fmt: skip
    height = sums.shape[-1]
    low_rank.expand[(pairs, triton.cdiv(height, LORA_ROWS))](
        low, b, b.stride(), lora.scales, lora.scales.stride(0), *whose, rows, sums, b.shape[2], height, rank,
        **same, ROWS=LORA_ROWS,
    )  # fmt: skip


def combine(
    batch: Batch, w2: Matrix, weights: torch.Tensor, shared: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's parts. shared: fp32 [T, H], of an expert that is none of the items'."""
    ids, (tokens, width) = batch.ids, out.shape
    share = tokens * width // (SUMMERS * multiprocessors(out.device))
    columns = max(LEAST_COLUMNS, min(COLUMNS, power_of_two_above(max(share, 1))))
    ends.combine[(tokens, triton.cdiv(width, columns))](
        batch.parts, batch.positions, len(batch.hidden), ids, ids.stride(), weights, weights.stride(), shared, out,
        out.stride(), width, SLOTS=batch.slots, LAST=batch.shared >= 0, SPLITS=batch.splits[1], COLUMNS=columns,
        powers=batch.powers, WIDTH=_power_rows(batch, w2), EARLY=batch.early, num_warps=4, **after(batch.early),
    )  # fmt: skip
    return out


def _power_rows(batch: Batch, w2: Matrix) -> int:
    """Of w2, for whose outputs of a token there is one power of two."""
    if wide.takes(batch, w2, batch.hidden):
        return int(wide.ROWS.value)
    return int(wide_codes.HALF.value) if wide_codes.takes_down(batch, w2) else batch.tuning.down.rows
