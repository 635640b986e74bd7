"""Converts a checkpoint's experts from AMD Quark's MXFP4 to FP8 with one power-of-two scale per row, without any loss.

    m3hal convert mxfp4-to-fp8 MiniMax-M3-MXFP4 MiniMax-M3-FP8 --profile hopper --workers 8

Routed experts become FP8 (compressed-tensors), shared experts BF16, everything else is copied byte for byte. A row
that one scale can't hold stops the conversion with its name: nothing is rounded. DST appears when it is complete; what
a killed run left in DST.converting is continued with --resume.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from m3hal.cli.output import emit
from m3hal.dispatch.errors import ConfigurationError, UnsupportedError

_FOUND = "all shards were there already; only m3hal validate tells whether they hold this source's numbers\n"
_INTERRUPTED = 130  # what shells report for SIGINT

HELP = "make a lossless FP8 checkpoint of an MXFP4 one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What, from where, to where, for which machine."""
    parser.add_argument("conversion", choices=("mxfp4-to-fp8",))
    parser.add_argument("source", metavar="SRC", type=Path, help="the downloaded checkpoint's folder; only read")
    parser.add_argument("target", metavar="DST", type=Path, help="a new folder")
    parser.add_argument("--profile", choices=("gaudi2", "hopper"), required=True, help="E4M3 up to 240 or up to 448")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="shards at a time (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue a killed or failed run")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, how long and how large")


def run(arguments: argparse.Namespace) -> int:
    """Passes when the target is complete, or would fit."""
    try:
        from m3hal.checkpoint import convert
        from m3hal.checkpoint.convert.preview import preview
        from m3hal.checkpoint.convert.progress import duration
    except ImportError as error:
        text = f"converting needs NumPy ({error}); install it with: pip install 'm3hal[convert]'"
        raise UnsupportedError(text) from None
    if not arguments.source.is_dir():
        raise ConfigurationError(f"{arguments.source} is not a folder; name the downloaded checkpoint's folder")
    if arguments.workers < 1:
        raise ConfigurationError(f"--workers {arguments.workers} leaves nobody to work; give 1 or more")
    profile = convert.PROFILES[arguments.profile]
    if arguments.dry_run:
        found = preview(arguments.source, arguments.target, profile, workers=arguments.workers, resume=arguments.resume)
        emit(arguments, asdict(found), str(found))
        return 0 if found.fits else 1
    try:
        done = convert.convert(
            arguments.source, arguments.target, profile, workers=arguments.workers, resume=arguments.resume
        )
    except KeyboardInterrupt:
        text = "interrupted; the same command with --resume continues"
        print(json.dumps({"error": text}) if arguments.json else f"\nm3hal: {text}", file=_stream(arguments))
        return _INTERRUPTED
    emit(
        arguments,
        {**asdict(done), "target": str(done.target)},
        f"{done.target}: {done.shards} shards, {done.size / 1e9:.4g} GB; this run wrote {done.fresh} shards in "
        f"{duration(done.seconds)} and checked {done.checked} source checksums\n"
        f"{'' if done.fresh else _FOUND}"
        f"next: m3hal validate {done.target} --source {arguments.source}",
    )
    return 0


def _stream(arguments: argparse.Namespace) -> TextIO:
    return sys.stdout if arguments.json else sys.stderr
