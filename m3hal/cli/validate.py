"""Checks a converted checkpoint against its source, with a reader and tables that share nothing with the converter.

Names, shapes, index, config, all scales and all unconverted bytes are always checked; of the experts' elements all, or
those of N matrices. Exit codes: 0 valid, 1 the self-test failed, 2 usage, 3 no NumPy, and for faults the first of

    10 unreadable   a file is no whole safetensors or JSON file
    11 missing      a tensor that the source asks for is absent
    12 unexpected   a tensor that the source does not ask for
    13 shape        another dtype or shape
    14 index        the index disagrees with the shards
    15 config       config.json does not describe these tensors
    16 scale        a scale is not a positive, finite power of two
    17 code         -0, NaN, infinity or a subnormal among the FP8 bytes
    18 value        an expert's number differs from the source's
    19 shared       a shared expert's number differs
    20 copy         a tensor that should be byte-identical is not
    21 file         another file is missing or differs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from m3hal.cli.output import emit
from m3hal.dispatch.errors import ConfigurationError, M3halError, UnsupportedError

HELP = "check a converted checkpoint against its source"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What, against what, how thoroughly."""
    parser.add_argument("target", metavar="DST", type=Path, help="the converted checkpoint")
    parser.add_argument("--source", metavar="SRC", type=Path, required=True, help="what it was made from")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--full", action="store_true", help="compare every element of every expert (the default)")
    depth.add_argument("--sample", type=int, metavar="N", help="compare the elements of N expert matrices")
    depth.add_argument("--self-test", action="store_true", help="corrupt a small copy in many ways; each must be found")
    parser.add_argument("--seed", type=int, default=0, help="which N (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="threads (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Passes when there is no fault."""
    try:
        from m3hal.checkpoint import validate
    except ImportError as error:
        text = f"validating needs NumPy ({error}); install it with: pip install 'm3hal[convert]'"
        raise UnsupportedError(text) from None
    for folder in (arguments.target, arguments.source):
        if not folder.is_dir():
            raise ConfigurationError(f"{folder} is not a folder; name a checkpoint's folder")
    if arguments.workers < 1:
        raise ConfigurationError(f"--workers {arguments.workers} leaves nobody to work; give 1 or more")
    if arguments.sample is not None and arguments.sample < 1:
        raise ConfigurationError(f"--sample {arguments.sample} compares no matrix; give 1 or more")
    if arguments.self_test:
        return _self_test(arguments)
    verdict = validate.validate(
        arguments.target,
        arguments.source,
        sample=arguments.sample,
        seed=arguments.seed,
        workers=arguments.workers,
        progress=_show if sys.stderr.isatty() else lambda done, total: None,
    )
    faults = [{"class": f.kind.name.lower(), "code": f.kind, "where": f.where, "what": f.what} for f in verdict.faults]
    data = {"faults": faults, "matrices_compared": verdict.compared, "matrices": verdict.experts}
    emit(arguments, data, "\n".join(verdict.lines()))
    return verdict.exit_code


def _show(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r{done} of {total} tensors compared", end=end, file=sys.stderr, flush=True)


def _self_test(arguments: argparse.Namespace) -> int:
    from m3hal.checkpoint.validate import self_test
    from m3hal.checkpoint.validate.faults import Broken

    rows = []
    try:
        for name, kind, code in self_test(arguments.target, arguments.source):
            rows.append({"done": name, "expected": int(kind or 0), "found": code, "passed": code == (kind or 0)})
    except Broken as broken:
        raise M3halError(f"no part of the checkpoint can be cut out for the self-test: {broken}") from None
    lines = [f"{'ok    ' if r['passed'] else 'MISSED'} {r['found']:2} {r['done']}" for r in rows]
    passed = all(row["passed"] for row in rows)
    lines.append(f"{sum(bool(row['passed']) for row in rows)} of {len(rows)} as expected")
    emit(arguments, {"passed": passed, "corruptions": rows}, "\n".join(lines))
    return 0 if passed else 1
