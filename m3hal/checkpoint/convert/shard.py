"""One shard: every row looked at before the first byte is written, every chunk decoded again before it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m3hal.checkpoint.convert import exact
from m3hal.checkpoint.convert.files import Output, Sources
from m3hal.checkpoint.convert.matrix import Matrix, require_exact
from m3hal.checkpoint.convert.plan import Shard
from m3hal.checkpoint.convert.profiles import Profile
from m3hal.checkpoint.convert.quark import BLOCK, Located, Quantised

_CHUNK = 1 << 18  # bytes read at once

#: called with the number of bytes written since the last call
Progress = Callable[[int], None]


@dataclass(frozen=True)
class ShardReport:
    """What a shard turned out to hold. scale_exponents: how many rows have the scale 2^key."""

    name: str
    size: int
    routed: int
    shared: int
    copied: int
    scale_exponents: dict[int, int]


def convert_shard(
    folder: Path,
    shard: Shard,
    profile: Profile,
    target: Path,
    progress: Progress,
    before_naming: Callable[[], None] = lambda: None,
) -> ShardReport:
    """Writes ``target / shard.name``. Raises ConversionError and leaves nothing; InexactError before any output.

    before_naming: called when the bytes are written and the name is not; what it raises discards them.
    """
    with Sources(folder) as sources:
        for matrix in shard.matrices:
            scan(sources, matrix, profile)
        output = Output(target / shard.name, shard.size)
        try:
            rows = _write(sources, shard, profile, output, progress)
            before_naming()
        except BaseException:
            output.discard()
            raise
        output.commit()
    routed = sum(matrix.routed for matrix in shard.matrices)
    used = {exponent - 127: int(count) for exponent, count in enumerate(rows) if count}
    return ShardReport(shard.name, shard.size, routed, len(shard.matrices) - routed, len(shard.copies), used)


def scan(sources: Sources, matrix: Quantised, profile: Profile) -> None:
    """Raises InexactError unless every row can be exact; reads the scales, and elements of doubtful rows."""
    width = matrix.columns // 2

    def codes_of(row: int) -> exact.Bytes:
        return sources.read(matrix.codes, row * width, width)

    require_exact(matrix.module, read_scales(sources, matrix), codes_of, profile if matrix.routed else None)


def read_scales(sources: Sources, matrix: Quantised) -> exact.Bytes:
    """uint8 [N, K/32]."""
    size = matrix.rows * matrix.columns // BLOCK
    return sources.read(matrix.scales, 0, size).reshape(matrix.rows, -1)


def _write(
    sources: Sources, shard: Shard, profile: Profile, output: Output, progress: Progress
) -> npt.NDArray[np.intp]:
    """All bytes of the shard; returns how many rows have each biased scale exponent."""
    progress(output.write(0, shard.head))
    used = np.zeros(256, np.intp)
    for matrix in shard.matrices:
        column = _write_matrix(sources, matrix, profile, output, shard.starts[matrix.module + ".weight"], progress)
        if matrix.routed:
            used += np.bincount(column.view(np.uint32)[:, 0] >> np.uint32(23), minlength=256)
            progress(output.write(shard.starts[matrix.module + ".weight_scale"], column))
    for tensor in shard.copies:
        for start in range(0, tensor.size, _CHUNK):
            data = sources.read(Located(shard.name, tensor), start, min(_CHUNK, tensor.size - start))
            progress(output.write(shard.starts[tensor.name] + start, data))
    return used


def _write_matrix(
    sources: Sources, matrix: Quantised, profile: Profile, output: Output, place: int, progress: Progress
) -> npt.NDArray[np.float32]:
    """Writes the weight, a few rows at a time; returns the row scales, [N, 1], or [0, 1] for BF16."""
    scales, width = read_scales(sources, matrix), matrix.columns // 2
    step = min(matrix.rows, max(1, _CHUNK // width))
    buffer, column = np.empty((step, width), np.uint8), []
    converter = Matrix(matrix.module, profile if matrix.routed else None, scales.shape[1], step)
    for first in range(0, matrix.rows, step):
        here = scales[first : first + step]
        codes = buffer[: len(here)]
        sources.read_into(matrix.codes, first * width, codes)
        data, weight_scale = converter.convert(codes, here)
        progress(output.write(place + first * data.shape[1], data))
        column.append(weight_scale)
    return np.concatenate(column)
