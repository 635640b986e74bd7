"""How fast is what a plan serves here: MiniMax-M3's shapes, beside the floor of each and beside a peer's kernels.

    m3hal bench --device cuda:sm_90 --peer vllm --out table.json --png shares.png
    m3hal bench --op sparse_attention --case "decode fp8"
    m3hal bench --op sparse_attention --require batch_invariant     the variant that declares a trait
    m3hal bench --device cpu                            small sizes, to try the command
    m3hal bench --device cuda:sm_90 --list              its rows; nothing is measured, it need not be here
    m3hal bench --read table.json --png shares.png      an earlier table

A row is the median of interleaved runs of every candidate, its outputs checked in the same run. The floor is the time
of the bytes that must be read and written, or of the operations, at the rates that the device showed at the start.
CUDA and ROCm GPUs tell their own time; elsewhere the host's is taken, and other accelerators are waited for.
Exits with 0 when every row was measured, 1 when an output was wrong or a call failed, 2 when the request means
nothing, 3 when the device is not here or nothing serves a row on it.
"""

from __future__ import annotations

import argparse

from m3hal.cli.conform import add_require, suite

HELP = "time operators beside their floors and a peer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, beside whom, and what to write."""
    parser.add_argument("--device", help="as `m3hal devices` lists it; this machine's first when left out")
    parser.add_argument("--backend", help="its name; what the policy says when left out")
    parser.add_argument("--op", action="append", default=[], metavar="OPERATOR", help="only its rows; may be repeated")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="TEXT",
        help="only rows whose case contains it; several: all of them",
    )
    add_require(parser)
    parser.add_argument("--peer", choices=("vllm",), help="whose kernels to time in the same rows, where importable")
    parser.add_argument("--runs", type=_runs, help="interleaved runs, at least 5 (default: 7)")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="on a GPU, no overlap between calls: kernels launched early gain nothing from the call before",
    )
    parser.add_argument("--small", action="store_true", help="small sizes, as on a CPU")
    parser.add_argument("--check-only", action="store_true", help="compile and check outputs, and time nothing")
    parser.add_argument("--list", action="store_true", help="print the rows and run none")
    parser.add_argument("--read", metavar="FILE", help="measure nothing: print, or draw, what --out wrote")
    parser.add_argument("--out", metavar="FILE", help="write the JSON that --json prints")
    parser.add_argument("--png", metavar="FILE", help="draw the shares of the floors; needs matplotlib")


def run(arguments: argparse.Namespace) -> int:
    """Measures; raises UnsupportedError where the conformance suite, which checks the outputs, isn't installed."""
    code: int = suite("m3hal_conformance.bench.command").bench(arguments)
    return code


def _runs(text: str) -> int:
    if not text.isdigit() or int(text) < 5:
        raise argparse.ArgumentTypeError(f"a median needs 5 runs or more, not {text}")
    return int(text)
