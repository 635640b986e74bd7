"""One shard: every row looked at before the first byte is written, every chunk decoded again before it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from m3hal.checkpoint.convert import exact
from m3hal.checkpoint.convert.errors import ConversionError, InexactError
from m3hal.checkpoint.convert.files import Output, Sources
from m3hal.checkpoint.convert.plan import Shard
from m3hal.checkpoint.convert.profiles import Profile
from m3hal.checkpoint.convert.quark import BLOCK, Located, Quantised

_CHUNK = 1 << 19  # bytes read at once
_FLOAT32_TOP = 254
_BF16_FIELDS = (1, 254)  # exponent fields of BF16's normal numbers

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
    """Raises InexactError, naming tensor, row and block, unless every row can be exact.

    The scales alone settle nearly every row; where they leave doubt, the row's elements are looked at.
    """
    scales = read_scales(sources, matrix)
    bad = np.argwhere(scales == exact.E8M0_NAN)
    if len(bad):
        raise InexactError(f"{matrix.module}: row {bad[0][0]}, block {bad[0][1]} has the scale NaN (E8M0 byte 255)")
    if matrix.routed:
        low, high = _allowed(profile)
        span = profile.top - profile.bottom
        lowest, highest = scales.min(axis=1).astype(int) - 1, scales.max(axis=1).astype(int) + 2
        doubtful = (highest - lowest > span) | (lowest < low) | (highest > high)
    else:
        doubtful = (scales.min(axis=1) < _BF16_FIELDS[0] + 1) | (scales.max(axis=1) > _BF16_FIELDS[1] - 2)
    for row in np.flatnonzero(doubtful):
        codes = sources.read(matrix.codes, int(row) * matrix.columns // 2, matrix.columns // 2)[None]
        _require_exact(matrix, profile, int(row), codes, scales[row])


def read_scales(sources: Sources, matrix: Quantised) -> exact.Bytes:
    """uint8 [N, K/32]."""
    size = matrix.rows * matrix.columns // BLOCK
    return sources.read(matrix.scales, 0, size).reshape(matrix.rows, -1)


def _allowed(profile: Profile) -> tuple[int, int]:
    """Biased exponents of a row's largest element for which the scale is usable and the number is finite in float32."""
    low, high = exact.SCALE_RANGE
    return low + profile.top, min(high + profile.top, _FLOAT32_TOP)


def _require_exact(matrix: Quantised, profile: Profile, row: int, codes: exact.Bytes, scales: exact.Bytes) -> None:
    exponents = exact.magnitude_exponents(codes)[0].astype(int)
    present = np.flatnonzero(exponents != exact.NO_ELEMENT)
    if not len(present):
        return
    biased = exponents[present] + scales[present // BLOCK]
    (lo, lo_block), (hi, hi_block) = (
        (int(biased[i]), int(present[i]) // BLOCK) for i in (biased.argmin(), biased.argmax())
    )
    where = f"{matrix.module}: row {row}"
    if not matrix.routed:
        if lo < _BF16_FIELDS[0] or hi > _BF16_FIELDS[1]:
            block = lo_block if lo < _BF16_FIELDS[0] else hi_block
            raise InexactError(f"{where}, block {block} has a number outside BF16's normal range, 2^-126 to 2^127")
        return
    if hi - lo > profile.top - profile.bottom:
        raise InexactError(
            f"{where} spans {hi - lo + 1} powers of two, from 2^{lo - 127} in block {lo_block} to 2^{hi - 127} in "
            f"block {hi_block}; one scale holds {profile.binades} (profile {profile.name}), and nothing is rounded"
        )
    low, high = _allowed(profile)
    if not low <= hi <= high:
        raise InexactError(
            f"{where}, block {hi_block} reaches 2^{hi - 127}; number or scale would leave float32's normal range, "
            f"which holds rows that reach 2^{low - 127} to 2^{high - 127}"
        )


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
    encoder = exact.Encoder(profile, scales.shape[1], step)
    for first in range(0, matrix.rows, step):
        here = scales[first : first + step]
        codes = buffer[: len(here)]
        sources.read_into(matrix.codes, first * width, codes)
        if matrix.routed:
            data, weight_scale = encoder.encode(codes, here)
            same = encoder.equal(codes, here, data, weight_scale)
        else:
            data, weight_scale = exact.to_bf16(codes, here), np.empty((0, 1), np.float32)
            same = exact.bf16_equal(codes, here, data)
        if not same:
            raise ConversionError(
                f"{matrix.module}: rows {first} to {first + len(codes) - 1} decode to other numbers than the source; "
                "the file changed while it was read, or this machine's memory is faulty, or m3hal is: please report it"
            )
        progress(output.write(place + first * data.shape[1], data))
        column.append(weight_scale)
    return np.concatenate(column)
