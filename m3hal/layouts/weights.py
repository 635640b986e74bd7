"""Weights as kernels want them: scales in tiles, gate and up rows interleaved; and back. Every byte is kept.

At the interface scales are [rows, groups] and an expert's w13 is ``[gate | up]`` halves. A backend converts once, in
``prepare_weights``.
"""

from __future__ import annotations

from dataclasses import replace

from m3hal._lazy import torch
from m3hal.formats import QTensor

_ROWS, _GROUPS = 128, 4  # of a tile


def swizzle_128x4(scale: torch.Tensor, padding: int) -> torch.Tensor:
    """Scale bytes in the tiles that Blackwell's tensor cores read.

    scale: uint8 [..., rows, groups]. padding: the byte that fills the last tiles up, 127 for E8M0 (a factor of 1) and 0
        for E4M3.
    Returns [..., ceil(rows / 128), ceil(groups / 4), 512]; byte ``(r % 32) * 16 + (r % 128) // 32 * 4 + c % 4`` of tile
    (r // 128, c // 4) is that of row r and group c.
    """
    rows, groups = scale.shape[-2:]
    tiles = (-(-rows // _ROWS), -(-groups // _GROUPS))
    missing = (0, tiles[1] * _GROUPS - groups, 0, tiles[0] * _ROWS - rows)
    padded = torch.nn.functional.pad(scale, missing, value=padding)
    split = padded.reshape(*scale.shape[:-2], tiles[0], 4, 32, tiles[1], _GROUPS)
    return split.movedim(-2, -4).transpose(-3, -2).reshape(*scale.shape[:-2], *tiles, _ROWS * _GROUPS)


def unswizzle_128x4(tiles: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """The inverse of :func:`swizzle_128x4`: uint8 [..., rows, groups]."""
    *batch, down, across, _ = tiles.shape
    split = tiles.reshape(*batch, down, across, 32, 4, _GROUPS).transpose(-3, -2).movedim(-4, -2)
    return split.reshape(*batch, down * _ROWS, across * _GROUPS)[..., :rows, :groups]


def interleave_gate_up(w13: torch.Tensor | QTensor) -> torch.Tensor | QTensor:
    """Rows gate 0, up 0, gate 1, up 1, ... of [E, 2*I, ...] in halves; codes, scales and global scales alike.

    A bias [E, 2*I] is converted by the same call.
    """
    return _by_rows(w13, (2, -1))


def deinterleave_gate_up(w13: torch.Tensor | QTensor) -> torch.Tensor | QTensor:
    """The inverse of :func:`interleave_gate_up`."""
    return _by_rows(w13, (-1, 2))


def _by_rows(w13: torch.Tensor | QTensor, split: tuple[int, int]) -> torch.Tensor | QTensor:
    """Axis 1 as a matrix of the given shape, transposed."""

    def turn(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.ndim < 2 or tensor.shape[1] == 1:  # a scale that all rows of an expert share
            return tensor
        rows = tensor.shape[1] // 2
        matrix = tensor.reshape(len(tensor), *(rows if size == -1 else size for size in split), *tensor.shape[2:])
        return matrix.transpose(1, 2).reshape(tensor.shape)

    if isinstance(w13, QTensor):
        data, scale, global_scale = turn(w13.data), turn(w13.scale), turn(w13.global_scale)
        assert data is not None
        return replace(w13, data=data, scale=scale, global_scale=global_scale)
    turned = turn(w13)
    assert turned is not None
    return turned
