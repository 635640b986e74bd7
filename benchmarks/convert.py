"""How fast the converter writes, beside ``cp`` writing the same bytes to the same disk.

    python benchmarks/convert.py --folder /a/folder/on/the/disk [--gb 6] [--repeats 3] > benchmarks/convert.json

Both sides read from a cold cache and end with fsync; they take turns, so that a busy machine slows both. Needs three
and a half times ``--gb`` of room, which it gives back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from m3hal.checkpoint.convert import GAUDI2, convert
from m3hal.checkpoint.synthetic import Synthetic, write

#: MiniMax-M3 with FP8 experts, GiB written
REAL_GIB = 411


def main() -> None:
    """Writes the JSON to standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=6.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    source = args.folder / "benchmark-source"
    if not source.exists():
        write(source, model_of(args.gb))
    try:
        json.dump(measure(args.folder, source, args.repeats, args.workers), sys.stdout, indent=2)
        print()
    finally:
        shutil.rmtree(source)


def model_of(gigabytes: float) -> Synthetic:
    """About that much in Quark's layout: experts are four fifths of it, as they are nine tenths of M3."""
    return Synthetic(layers=3, dense=1, experts=round(80 * gigabytes / 6), vocab=2048, shard_bytes=1 << 30)


def measure(folder: Path, source: Path, repeats: int, workers: int) -> dict[str, object]:
    """Seconds and rates of both, and what follows for the real checkpoint; one worker is timed once."""
    runs: dict[str, list[float]] = {"convert": [], "convert, one worker": [], "cp": []}
    target, copy = folder / "benchmark-fp8", folder / "benchmark-copy"
    for turn in range(repeats):
        for name, count in (("convert", workers), ("convert, one worker", 1))[: 1 + (turn == 0)]:
            shutil.rmtree(target, ignore_errors=True)
            chill(source)
            start = time.perf_counter()
            convert(source, target, GAUDI2, workers=count)
            runs[name].append(time.perf_counter() - start)
        chill(target)
        start = time.perf_counter()
        subprocess.run(["cp", "-r", target, copy], check=True)
        subprocess.run(["sync", *copy.iterdir()], check=True)
        runs["cp"].append(time.perf_counter() - start)
        written = size_of(copy)
        shutil.rmtree(copy)
    shutil.rmtree(target)
    seconds = {name: statistics.median(times) for name, times in runs.items()}
    rate = {name: written / median for name, median in seconds.items()}
    real = REAL_GIB * 2**30
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "source_bytes": size_of(source),
        "written_bytes": written,
        "workers": workers,
        "seconds": {name: [round(value, 2) for value in times] for name, times in runs.items()},
        "median_MB_per_s": {name: round(value / 1e6) for name, value in rate.items()},
        "convert_to_cp": round(rate["convert"] / rate["cp"], 3),
        "real_checkpoint_minutes": {
            "1 worker": round(real / rate["convert, one worker"] / 60, 1),
            "16 workers, a core each and a disk that keeps up": round(real / rate["convert, one worker"] / 60 / 16, 1),
        },
    }


def size_of(folder: Path) -> int:
    """Bytes of its files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def chill(folder: Path) -> None:
    """Drops a folder's files from the page cache; they must be clean, so they are synced first."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


if __name__ == "__main__":
    main()
