"""Weight layouts: every byte where the kernels look for it, and back."""

from __future__ import annotations

import pytest
import torch

from m3hal import formats
from m3hal.formats import QTensor, spec_of
from m3hal.layouts.weights import deinterleave_gate_up, interleave_gate_up, swizzle_128x4, unswizzle_128x4


@pytest.mark.parametrize("rows", [1, 32, 128, 200])
@pytest.mark.parametrize("groups", [1, 3, 4, 12, 13])
def test_swizzled_scales_lie_where_the_formula_says(rows: int, groups: int) -> None:
    """Also where rows and groups don't fill tiles: the rest is padding."""
    scale = torch.randint(1, 127, (rows, groups), generator=torch.Generator().manual_seed(rows)).to(torch.uint8)
    tiles = swizzle_128x4(scale, padding=127)
    across = -(-groups // 4)
    flat = tiles.flatten().tolist()
    seen = set()
    for r in range(rows):
        for c in range(groups):
            place = ((r // 128) * across + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            assert flat[place] == scale[r, c]
            seen.add(place)
    assert all(byte == 127 for place, byte in enumerate(flat) if place not in seen)
    assert torch.equal(unswizzle_128x4(tiles, rows, groups), scale)


def test_experts_are_swizzled_apart() -> None:
    """A leading axis is a batch."""
    scale = torch.arange(3 * 130 * 5).to(torch.uint8).view(3, 130, 5)
    tiles = swizzle_128x4(scale, padding=0)
    assert tiles.shape == (3, 2, 2, 512)
    assert torch.equal(tiles[1], swizzle_128x4(scale[1], padding=0))
    assert torch.equal(unswizzle_128x4(tiles, 130, 5), scale)


def test_rows_interleave_with_their_scales() -> None:
    """Gate and up rows alternate; codes, block scales and per-row global scales go with their row."""
    w13 = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
    rows = [0, 3, 1, 4, 2, 5]
    assert torch.equal(interleave_gate_up(w13), w13[:, rows])
    assert torch.equal(interleave_gate_up(w13[..., 0]), w13[:, rows, 0])
    per_row = torch.rand(2, 6, 1) + 0.5
    for q in (
        formats.quantize(w13, spec_of("mxfp4")),
        formats.quantize(w13, spec_of("fp8_e4m3")),
        formats.quantize(w13, spec_of("nvfp4"), per_row),
        formats.quantize(w13, spec_of("nvfp4"), per_row[:, :1]),
        formats.quantize(w13, spec_of("nvfp4"), torch.tensor(0.5)),
    ):
        turned = interleave_gate_up(q)
        assert isinstance(turned, QTensor)
        assert torch.equal(formats.dequantize(turned), formats.dequantize(q)[:, rows])
        back = deinterleave_gate_up(turned)
        assert isinstance(back, QTensor)
        assert torch.equal(back.data, q.data)
        assert torch.equal(formats.dequantize(back), formats.dequantize(q))
