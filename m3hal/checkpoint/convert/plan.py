"""What will be written: one output shard per source shard, its header and every tensor's place in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from m3hal.checkpoint.convert.container import Entry, Header, Tensor, layout
from m3hal.checkpoint.convert.quark import Quantised, Source


@dataclass(frozen=True)
class Shard:
    """An output file. starts: each tensor's absolute offset. size: of the whole file."""

    name: str
    matrices: tuple[Quantised, ...]
    copies: tuple[Tensor, ...]
    head: bytes
    starts: Mapping[str, int]
    size: int


def plan_shards(source: Source) -> tuple[Shard, ...]:
    """The output shards in name order. A matrix goes where its codes lie; a shard of nothing but scales vanishes."""
    matrices: dict[str, list[Quantised]] = {}
    for matrix in source.quantised:
        matrices.setdefault(matrix.codes.shard, []).append(matrix)
    taken = {located.tensor.name for matrix in source.quantised for located in (matrix.codes, matrix.scales)}
    shards = (
        _shard(name, header, tuple(matrices.get(name, ())), taken) for name, header in sorted(source.shards.items())
    )
    return tuple(shard for shard in shards if shard.starts)


def outputs(matrix: Quantised) -> Iterator[Entry]:
    """Name, dtype and shape of what a matrix becomes."""
    if matrix.routed:
        yield matrix.module + ".weight", "F8_E4M3", (matrix.rows, matrix.columns)
        yield matrix.module + ".weight_scale", "F32", (matrix.rows, 1)
    else:
        yield matrix.module + ".weight", "BF16", (matrix.rows, matrix.columns)


def weight_map(shards: tuple[Shard, ...]) -> tuple[dict[str, str], int]:
    """The index's map from tensor to shard, and its total_size."""
    names = {name: shard.name for shard in shards for name in shard.starts}
    return dict(sorted(names.items())), sum(shard.size - len(shard.head) for shard in shards)


def _shard(name: str, header: Header, matrices: tuple[Quantised, ...], taken: set[str]) -> Shard:
    copies = tuple(tensor for tensor in header.tensors.values() if tensor.name not in taken)
    entries: list[Entry] = [(tensor.name, tensor.dtype, tensor.shape) for tensor in copies]
    entries += [entry for matrix in matrices for entry in outputs(matrix)]
    in_read_order = tuple(sorted(matrices, key=lambda matrix: matrix.codes.tensor.start))
    return Shard(name, in_read_order, copies, *layout(entries, header.metadata))
