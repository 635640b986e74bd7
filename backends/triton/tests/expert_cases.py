"""Calls of ``moe_experts`` for machine_cases.py: real sizes, two experts, weights of no particular numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from m3hal_triton.manifest import MANIFEST

from m3hal.formats import FORMATS, PLAIN_FORMATS, QTensor, spec_of
from m3hal.shape import Site


def _matrix(format: str, rows: int, size: int, *, in_order: bool) -> object:
    """As ``prepare_weights`` lays one out."""
    from m3hal_triton._moe_weights import empty

    if format in PLAIN_FORMATS:
        weight = torch.empty(2, rows, size, dtype=getattr(torch, format))
    else:
        weight = QTensor(torch.empty(2, rows, size * FORMATS[format].bits // 8, dtype=torch.uint8), spec_of(format))
    return empty(weight, None, one_more=False, in_order=in_order)


def _experts(
    site: Site, tokens: int, format: str, factory: str = "moe_experts", dtype: str = "bfloat16", ranks: int = 1
) -> None:
    from m3hal_triton import moe_experts, moe_scaled
    from m3hal_triton._moe_weights import Packed

    inner = site.intermediate_size // ranks
    where = replace(site, weight_format=format, dtype=dtype, max_tokens=tokens, intermediate_size=inner)
    hidden = where.hidden_size
    kernel = getattr(moe_scaled if hasattr(moe_scaled, factory) else moe_experts, factory)(where)
    in_order = kernel.prepare_weights.keywords["in_order"]
    packed = Packed(*(_matrix(format, *shape, in_order=in_order) for shape in ((2 * inner, hidden), (hidden, inner))))
    x, ids = torch.empty(tokens, hidden, dtype=getattr(torch, dtype)), torch.zeros(tokens, 4, dtype=torch.int32)
    workspace = torch.empty(kernel.workspace_bytes, dtype=torch.uint8)
    kernel.run(x, torch.empty(tokens, 4), ids, packed, workspace=workspace)


def cases(site: Callable[[], Site]) -> dict[str, Callable[[], None]]:
    """By name; site: makes the experts' site in bf16."""

    def case(*given: object) -> Callable[[], None]:
        return lambda: _experts(site(), *given)

    return {
        "experts 1 bf16": case(1, "bfloat16"),
        "experts 1 mxfp8": case(1, "mxfp8"),
        "experts 1 nvfp4": case(1, "nvfp4"),
        "experts 1 mxfp4": case(1, "mxfp4"),
        "experts 64 bf16": case(64, "bfloat16"),
        "experts 512 mxfp8": case(512, "mxfp8"),
        "experts 64 mxfp4": case(64, "mxfp4"),
        "experts 64 nvfp4": case(64, "nvfp4"),
        "experts 8192 bf16": case(8192, "bfloat16"),
        "experts 8192 mxfp8": case(8192, "mxfp8"),
        "experts 8192 fp8": case(8192, "fp8_e4m3"),
        "experts 8192 fp8 activations": case(8192, "fp8_e4m3", "fp8_activations"),
        "experts 8 nvfp4 of four ranks": case(8, "nvfp4", "moe_experts", "bfloat16", 4),
        "experts 8 mxfp4 of four ranks": case(8, "mxfp4", "moe_experts", "bfloat16", 4),
        "experts 64 fp32": case(64, "float32", "moe_experts", "float32"),
        **{name: case(*given) for name, given in _BLOCKS.items()},
    }


#: (tokens, weights, implementation) whose products are of blocks
_BLOCKS: dict[str, tuple[int, str, str]] = {
    f"experts {tokens} {weights} by {activations}": (tokens, weights, f"{activations}_activations")
    for tokens in (64, 512, 8192)
    for weights, activations in (("mxfp4", "mxfp8"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"))
}


def only() -> dict[str, tuple[str, ...]]:
    """Case -> the targets that the manifest offers it to, where that is not all of them."""
    devices = {impl.name: impl.devices for impl in MANIFEST.operators["moe_experts"]}
    return {
        name: tuple(device.partition(":")[2] for device in devices[factory])
        for name, (_, _, factory) in _BLOCKS.items()
    }
