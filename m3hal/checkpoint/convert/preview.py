"""What a conversion would do, without writing: names, shapes, scales and room are looked at as for a real one."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from m3hal import __version__
from m3hal.checkpoint.convert import exact
from m3hal.checkpoint.convert.files import Sources
from m3hal.checkpoint.convert.journal import identity
from m3hal.checkpoint.convert.plan import plan_shards
from m3hal.checkpoint.convert.profiles import Profile
from m3hal.checkpoint.convert.progress import duration
from m3hal.checkpoint.convert.quark import Quantised, open_source
from m3hal.checkpoint.convert.run import is_complete, nearest_folder, other_files, require_usable, resolve
from m3hal.checkpoint.convert.shard import read_scales, scan
from m3hal.checkpoint.convert.sums import known_sums

_PROBE_ROWS = 128
_PROBE_SECONDS = 0.3


@dataclass(frozen=True)
class Preview:
    """Sizes in bytes. rate: bytes a second that one worker converts here, in memory; a slower disk sets the pace."""

    target: str
    profile: str
    shards: int
    routed_matrices: int
    shared_matrices: int
    copied_tensors: int
    other_files: int
    checksums_known: int
    source_bytes: int
    written_bytes: int
    free_bytes: int
    worker_rate: float
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.written_bytes <= self.free_bytes

    def __str__(self) -> str:
        sums = f"{self.checksums_known} of {self.shards} source shards have a known checksum"
        return "\n".join(
            (
                f"would write {self.shards} shards to {self.target}, profile {self.profile}:",
                f"  {self.routed_matrices} routed expert matrices to FP8; every row fits one power-of-two scale",
                f"  {self.shared_matrices} shared expert matrices to BF16",
                f"  {self.copied_tensors} tensors and {self.other_files} other files byte for byte; {sums}",
                f"  {self.source_bytes / 1e9:.4g} GB read, {self.written_bytes / 1e9:.4g} GB written, "
                f"{self.free_bytes / 1e9:.4g} GB free{'' if self.fits else ': NOT ENOUGH ROOM'}",
                f"  about {duration(self.seconds)} at {self.worker_rate / 1e6:.0f} MB/s a worker, if the disk keeps up",
            )
        )


def preview(folder: Path, target: Path, profile: Profile, *, workers: int = 1, resume: bool = False) -> Preview:
    """Raises ConversionError where ``convert`` would, before its first byte. Reads all scales, a sixteenth of all."""
    paths = resolve(folder, target)
    source = open_source(paths.source)
    shards = plan_shards(source)
    is_complete(paths, identity(source, profile, __version__), resume)
    require_usable(paths, resume)
    with Sources(paths.source) as sources:
        for matrix in source.quantised:
            scan(sources, matrix, profile)
        rate = _rate(sources, next(matrix for matrix in source.quantised if matrix.routed), profile)
    written, routed = sum(shard.size for shard in shards), sum(matrix.routed for matrix in source.quantised)
    return Preview(
        target=str(paths.target),
        profile=profile.name,
        shards=len(shards),
        routed_matrices=routed,
        shared_matrices=len(source.quantised) - routed,
        copied_tensors=sum(len(shard.copies) for shard in shards),
        other_files=len(other_files(paths.source)),
        checksums_known=len(known_sums(paths.source, source.shards)),
        source_bytes=sum(header.file_size for header in source.shards.values()),
        written_bytes=written,
        free_bytes=shutil.disk_usage(nearest_folder(paths.target)).free,
        worker_rate=rate,
        seconds=written / (rate * min(workers, len(shards))),
    )


def _rate(sources: Sources, matrix: Quantised, profile: Profile) -> float:
    """Converts a few rows again and again; bytes of FP8 a second, encoded and decoded."""
    rows = min(_PROBE_ROWS, matrix.rows)
    codes = sources.read(matrix.codes, 0, rows * matrix.columns // 2).reshape(rows, -1)
    scales = read_scales(sources, matrix)[:rows]
    encoder = exact.Encoder(profile, scales.shape[1], rows)
    encoder.equal(codes, scales, *encoder.encode(codes, scales))  # the first use makes the tables
    start, made = time.perf_counter(), 0
    while time.perf_counter() - start < _PROBE_SECONDS:
        fp8, weight_scale = encoder.encode(codes, scales)
        encoder.equal(codes, scales, fp8, weight_scale)
        made += fp8.size
    return made / (time.perf_counter() - start)
