"""``moe_experts`` by matrix units that take blocks of codes and their scales.

MXFP4 and MXFP8 weights meet MXFP8 activations, MXFP4 weights also MXFP4 ones, NVFP4 weights NVFP4 ones. Tokens and
hidden activations are rounded to that format, once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton

from m3hal.dispatch.manifest import Kernel
from m3hal.formats import FORMATS, spec_of
from m3hal.ops import ExpertLoRA, load
from m3hal.shape import Site
from m3hal_triton import _moe_align as align
from m3hal_triton import _moe_combine as ends
from m3hal_triton import _moe_scaled as products
from m3hal_triton import _moe_weights as packing
from m3hal_triton._launch import converts, power_of_two_above
from m3hal_triton._moe_tuning import Tuning, scaled
from m3hal_triton._moe_weights import Matrix, Packed
from m3hal_triton._workspace import Memory, Room
from m3hal_triton.quantize import COLUMNS, MIN_COLUMNS

#: what holds a format's codes, where that is not bytes: bytes that are relabelled in a kernel pass through registers
CODES = {"mxfp8": torch.float8_e4m3fn}


def mxfp8_activations(site: Site) -> Kernel:
    """MXFP4 or MXFP8 weights times activations rounded to MXFP8. Where no unit takes them, by way of bf16."""
    return _kernel(site, "mxfp8")


def mxfp4_activations(site: Site) -> Kernel:
    """MXFP4 weights times activations rounded to MXFP4."""
    return _kernel(site, "mxfp4")


def nvfp4_activations(site: Site) -> Kernel:
    """NVFP4 weights times activations rounded to NVFP4, over the checkpoint's global scales where it has them."""
    return _kernel(site, "nvfp4")


def _kernel(site: Site, activation: str) -> Kernel:
    run = _Run(site, activation)
    return Kernel(
        run=run,
        workspace_bytes=run.room(site.max_tokens).total,
        prepare_weights=partial(packing.prepare, in_order=True),
        update_weights=partial(packing.update, in_order=True),
        unpack=packing.unpack,
    )


def takes_nvfp4() -> bool:
    """Whether the GPU's matrix unit scales by E4M3, as Blackwell's does."""
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability()[0] == 10


class _Run:
    """``run(x, weights, ids, experts, out=None, workspace=None)``."""

    def __init__(self, site: Site, activation: str) -> None:
        self._site, self._activation = site, activation
        self._slots, self._experts = site.top_k_experts, site.num_local_experts
        self._group, self._bits = spec_of(activation).group, FORMATS[activation].bits
        self._is_scaled = activation != "nvfp4" or takes_nvfp4()
        self._codes = CODES.get(activation, torch.uint8)
        self._ladder = scaled(128 * 8 // self._bits if self._is_scaled else 64)
        self._fake = load("moe_experts").fake

    def room(self, tokens: int) -> Room:
        """What a call of so many tokens needs."""
        site, pairs, room = self._site, tokens * self._slots, Room()
        room.add("numbers", 4 * (power_of_two_above(self._experts) + 1))
        room.add("items", 16 * (min(self._experts, pairs) + pairs // 16 + 1))
        room.add("order", 4 * pairs)
        room.add("positions", 4 * pairs)
        for name, count in (
            ("x", tokens * site.hidden_size),
            ("hidden", pairs * packing.padded(site.intermediate_size)),
        ):
            room.add(name, count * self._bits // 8)
            room.add(f"{name}_scales", count // self._group)
        room.add("parts", 4 * pairs * site.hidden_size)
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
        if lora is not None or experts.shared is not None:
            raise ValueError("products of blocks have no adapters and no shared expert; plan the site with what it has")
        assert workspace is not None
        memory, (tokens, width) = Memory(self.room(len(x)), workspace), x.shape
        pairs = tokens * self._slots
        tuning = next(tuning for most, tuning in self._ladder if pairs <= most * self._experts)
        positions = self._sort(ids, memory, tuning)
        given, rounded = memory.take("x", torch.uint8, -1), memory.take("x_scales", torch.uint8, -1)
        columns = max(MIN_COLUMNS, min(power_of_two_above(width), COLUMNS))
        products.round_tokens[(tokens, triton.cdiv(width, columns))](
            x, x.stride(), given, rounded, experts.x_scale, width, COLUMNS=columns, FORMAT=self._activation,
            NATIVE=self._activation == "mxfp8" and converts(x.device), num_warps=max(1, min(4, columns // 512)),
        )  # fmt: skip
        parts = self._multiply(x, experts, memory, tuning, pairs)
        ends.combine[(tokens, triton.cdiv(width, COLUMNS))](
            parts, positions, pairs, ids, ids.stride(), weights, weights.stride(), None, result, result.stride(), width,
            SLOTS=self._slots, SPLITS=1, COLUMNS=min(COLUMNS, power_of_two_above(width)), EARLY=False, num_warps=4,
        )  # fmt: skip
        return result

    def _sort(self, ids: torch.Tensor, memory: Memory, tuning: Tuning) -> torch.Tensor:
        """Positions of the pairs; their order and the work items are in memory."""
        pairs, numbers = ids.numel(), memory.take("numbers", torch.int32, -1)
        order, items, positions = (memory.take(name, torch.int32, -1) for name in ("order", "items", "positions"))
        at_once, counts = pairs <= align.AT_ONCE, numbers[:-1]
        same: dict[str, Any] = {
            "SLOTS": self._slots,
            "EXPERTS": len(counts),
            "PAIRS": align.PAIRS,
            "MOST": tuning.tokens,
        }
        sorters = align.sorters_of(pairs)
        if not at_once:
            counts.zero_()
        align.begin[(sorters,)](
            ids, (0, 0), None, None, ids, ids.stride(), order, items, numbers[-1:], positions, counts, len(ids), pairs,
            sorters, 0, 0, **same, MINE=align.MINE if at_once else 0, WIDE=64, FOUR_BIT=False,
            EARLY=False, num_warps=8,
        )  # fmt: skip
        if not at_once:
            align.scatter[(sorters,)](
                ids, ids.stride(), positions, counts, order, items, numbers[-1:], pairs, num_warps=8, **same
            )
        return positions

    def _multiply(self, x: torch.Tensor, experts: Packed, memory: Memory, tuning: Tuning, pairs: int) -> torch.Tensor:
        """fp32 [1, pairs, H]: what each pair's expert makes of its token, in the order of the experts."""
        site, (w13, w2) = self._site, (experts.w13, experts.w2)
        inner, count = packing.padded(site.intermediate_size), min(self._experts, pairs) + pairs // tuning.tokens
        items, order = memory.take("items", torch.int32, -1), memory.take("order", torch.int32, -1)
        given, hidden = (
            (memory.take(name, self._codes, -1), memory.take(f"{name}_scales", torch.uint8, -1), multiplier)
            for name, multiplier in (("x", experts.x_scale), ("hidden", experts.hidden_scale))
        )
        total, parts = memory.take("numbers", torch.int32, -1)[-1:], memory.take("parts", torch.float32, 1, pairs, -1)
        up, down = self._common(w13, tuning), self._common(w2, tuning)
        products.up_scaled[(count * triton.cdiv(w13.rows, up["BN"]),)](
            *given, _arguments(w13), items, total, order, *hidden, w13.size, inner, (site.alpha, site.beta, site.limit),
            SLOTS=self._slots, NATIVE=self._activation == "mxfp8" and converts(x.device), **up,
        )  # fmt: skip
        products.down_scaled[(count * triton.cdiv(w2.rows, down["BN"]),)](
            *hidden, _arguments(w2), items, total, parts, w2.size, inner, w2.rows, **down
        )
        return parts

    def _common(self, matrix: Matrix, tuning: Tuning) -> dict[str, Any]:
        """Launch arguments that both products take."""
        assert matrix.spec is not None
        tile = tuning.up
        return {
            "BN": tile.rows,
            "BT": tuning.tokens,
            "BK": tile.depth,
            "FORMAT": matrix.spec.format,
            "ACTIVATION": self._activation,
            "EVEN": matrix.size % tile.depth == 0,
            "SCALED": self._is_scaled,
            "STAGES": tile.stages,
            "num_warps": tile.warps,
        }


def _arguments(matrix: Matrix) -> tuple[Any, ...]:
    """As the kernels take it."""
    assert matrix.spec is not None
    assert matrix.scale is not None
    codes = matrix.codes.view(CODES.get(matrix.spec.format, torch.uint8))
    return codes, codes.stride()[:2], matrix.scale, matrix.scale.stride()[:2], None, matrix.factor
