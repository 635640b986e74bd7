"""What each rank holds of the routed experts, in every format; no engine, and ranks one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m3hal import formats, ops
from m3hal.formats import FORMATS, PLAIN_FORMATS, spec_of
from m3hal.formats.nvfp4 import global_scale_of

EXPERTS, ROWS, HIDDEN, TOKENS, TOP = 4, 64, 64, 6, 3
STATIC = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
STORED = ("float32", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4")


def published(format: str) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """(expert, matrix, leaf, tensor) as a checkpoint has them; gate and up with global scales of their own."""
    draw = torch.Generator().manual_seed(5)
    for expert in range(EXPERTS):
        for matrix, shape in (("w1", (ROWS, HIDDEN)), ("w3", (ROWS, HIDDEN)), ("w2", (HIDDEN, ROWS))):
            weight = torch.randn(shape, generator=draw) * (1 + expert)
            if format in PLAIN_FORMATS:
                yield expert, matrix, "weight", weight
                continue
            scale = global_scale_of(weight) if format == "nvfp4" else None
            stored = formats.quantize(weight, spec_of(format), scale)
            codes = stored.data.view(torch.float8_e4m3fn if FORMATS[format].bits == 8 else torch.uint8)
            yield expert, matrix, "weight", codes
            yield expert, matrix, "weight_scale", stored.scale
            if scale is not None:
                yield expert, matrix, "weight_scale_2", scale


def held(format: str, share: Any) -> Any:
    """One rank's experts, loaded."""
    from m3hal.vllm.experts import StoredExperts

    site = SimpleNamespace(
        weight_format=format,
        num_local_experts=share.experts,
        intermediate_size=ROWS // share.parts,
        hidden_size=HIDDEN,
    )
    bound = SimpleNamespace(prepare_weights=None, update_weights=None, backend="reference")
    experts = StoredExperts(SimpleNamespace(site=site, bound={"moe_experts": bound}), share, "layer.experts")
    for expert, matrix, leaf, tensor in published(format):
        experts.load(expert, matrix, leaf, tensor)
    experts.quant_method.process_weights_after_loading(experts)
    return experts


def computed(format: str, shares: list[Any]) -> torch.Tensor:
    """The sum over ranks."""
    draw = torch.Generator().manual_seed(6)
    x = torch.randn(TOKENS, HIDDEN, generator=draw)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP] for _ in range(TOKENS)]).int()
    weights = torch.rand(TOKENS, TOP, generator=draw)
    total = torch.zeros(TOKENS, HIDDEN)
    for share in shares:
        local = torch.tensor([[-1 if (n := share.local(int(e))) is None else n for e in row] for row in ids]).int()
        total += ops.load("moe_experts").reference(x, weights, local, held(format, share).packed, **STATIC)
    return total


@pytest.mark.parametrize("format", STORED)
@pytest.mark.parametrize("how", ["rows", "experts"])
def test_ranks_add_up(format: str, how: str) -> None:
    """Two ranks with half of the rows of every expert, or half of the experts, are one rank with all of them."""
    from m3hal.vllm.experts import Share

    whole = computed(format, [Share(0, EXPERTS)])
    half = EXPERTS // 2
    shares = {
        "rows": [Share(0, EXPERTS, part, 2) for part in range(2)],
        "experts": [Share(0, half), Share(half, half)],
    }
    assert torch.allclose(computed(format, shares[how]), whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))
    assert float(whole.abs().min()) > 0


def test_a_slice_that_cuts_a_group_is_refused() -> None:
    """Four ranks would get 16 of w2's columns, and 32 share a scale."""
    from m3hal.vllm.experts import Share

    with pytest.raises(ValueError, match=r"layer.experts: mxfp8 .* use fewer ranks or --enable-expert-parallel"):
        held("mxfp8", Share(0, EXPERTS, 0, 4))
