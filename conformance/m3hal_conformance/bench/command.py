"""``m3hal bench``: the part that needs torch. The command line's own file only parses."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m3hal._files import parsed
from m3hal.cli.output import emit
from m3hal.dispatch import Policy, devices
from m3hal.dispatch.errors import ConfigurationError, M3halError, UnsupportedError, did_you_mean
from m3hal.dispatch.table import table as cells
from m3hal_conformance.bench import clock, picture, table, vllm_peer
from m3hal_conformance.bench.bench import Bench
from m3hal_conformance.bench.rows import operators, rows
from m3hal_conformance.bench.table import Measured
from m3hal_conformance.bench.work import Row, Work, Wrong
from m3hal_conformance.claim import environment
from m3hal_conformance.command import check_writable, device_of, named_device, required, write
from m3hal_conformance.runner import Runner
from m3hal_conformance.trial import Unsupported


def bench(options: argparse.Namespace) -> int:
    """Measures the rows and writes what was asked for. 0: all right, 1: an output was wrong or a call failed."""
    chosen, require = _chosen(options.op), required(options)
    _check_together(options)
    check_writable(options, "out", "png")
    if options.png:
        picture.check_drawable()
    if options.read:
        return _read(options)
    device = (named_device if options.list else device_of)(options.device, options.backend)
    small = options.small or devices.kind(device) == "cpu"
    picked = _picked(chosen, options.case, small)
    if options.list:
        return _list(options, picked, device, small)
    backend = Policy.resolve().on(device).backend if options.backend is None else options.backend
    if backend == "vllm":
        raise ConfigurationError("backend 'vllm' dispatches nothing to measure; name another, beside --peer vllm.")
    peer, absent = vllm_peer.find(options.peer) if options.peer else (None, "")
    Runner(backend, device, require=require).check_placing()
    made = Bench(device, backend, peer, small, require)
    ceilings = {} if options.check_only else clock.ceilings(made.device)
    runs = 0 if options.check_only else options.runs or RUNS
    machine: dict[str, Any] = {"device": device, "backend": made.runner.backend, **environment(device)}
    machine |= {**made.runner.libraries(), "date": datetime.date.today().isoformat()}
    if require:
        machine["require"] = list(require)
    if absent:
        machine["peer_absent"] = absent
    command = shlex.join(["m3hal", *sys.argv[1:]]) if options.is_command_line else "m3hal bench"
    measured: list[Measured] = []
    for row in _measured(made, picked, ceilings, runs, options.apart, quiet=options.json):
        measured.append(row)
        if options.out:  # after each row: an interrupted run keeps what it has
            write(options.out, table.to_json(measured, machine, ceilings, command))
    written = table.to_json(measured, machine, ceilings, command)
    return _told(options, measured, written, machine, made, ceilings, command)


#: interleaved runs of a row, when left out
RUNS = 7
#: option -> those that it leaves nothing to do for, and why
_ALONE = {
    "read": (
        ("list", "device", "backend", "require", "peer", "apart", "small", "check_only", "out", "runs"),
        "--read measures nothing: it shows rows as they were measured, and --op and --case pick among them",
    ),
    "list": (("require", "out", "png", "runs"), "--list measures nothing: it shows what each row needs of a backend"),
    "check_only": (("png", "runs"), "--check-only times nothing, so that there are no shares to draw"),
}


def _check_together(options: argparse.Namespace) -> None:
    """Refuses an option that would be ignored beside another."""
    for name, (others, why) in _ALONE.items():
        idle = [f"--{other.replace('_', '-')}" for other in others if getattr(options, other)]
        if getattr(options, name) and idle:
            raise ConfigurationError(f"{why}. Leave out {' and '.join(idle)}.")


def _read(options: argparse.Namespace) -> int:
    """Prints and draws an earlier table."""
    try:
        text = Path(options.read).read_text(encoding="utf-8")
        kept = parsed(text)
        found = [Measured.read(row) for row in kept["rows"]]
        title = _title(kept["machine"])
        told = table.footer(
            found, kept["machine"], kept.get("ceilings", {}), kept.get("command") or "made by an unknown command"
        )
    except OSError as error:
        raise ConfigurationError(f"{options.read} can't be read: {error.strerror}.") from error
    except KeyError as error:
        raise ConfigurationError(f"{options.read} is no table that m3hal bench wrote: it has no {error}.") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{options.read} is no table that m3hal bench wrote: {error}.") from error
    picked = [row for row in found if not options.op or row.operator in options.op]
    picked = [row for row in picked if all(part in row.case for part in options.case)]
    if not picked:
        known = ", ".join(dict.fromkeys(row.operator for row in found))
        raise ConfigurationError(f"{options.read} has no such rows; its operators: {known}.")
    if len(picked) < len(found):
        kept["rows"] = [row for row, one in zip(kept["rows"], found, strict=True) if one in picked]
        text = json.dumps(kept, indent=1)
    print(text if options.json else f"{table.text(picked)}\n\n{told}")
    if options.png:
        _draw(picked, options.png, title)
    return 0


def _title(machine: Mapping[str, Any]) -> str:
    """Whose table it is: the device as its maker names it, where that is known."""
    device, label = machine["device"], machine.get("device_label")
    return f"{label} ({device}), {machine['backend']}" if label else f"{device}, {machine['backend']}"


def _draw(found: Sequence[Measured], path: str, title: str) -> None:
    picture.draw(found, Path(path), title)
    print(f"wrote {path}", file=sys.stderr)


def _chosen(names: Sequence[str]) -> list[str]:
    known = operators()
    for name in names:
        if name not in known:
            raise ConfigurationError(f"{name!r} has no rows.{did_you_mean(name, known)}")
    return list(dict.fromkeys(names)) or known


def _picked(chosen: Sequence[str], parts: Sequence[str], small: bool) -> list[Row]:
    picked = [row for name in chosen for row in rows(name, small) if all(part in row.case for part in parts)]
    if not picked:
        raise ConfigurationError(f"no row's case contains {' and '.join(map(repr, parts))}.")
    return picked


def _list(options: argparse.Namespace, picked: Sequence[Row], device: str, small: bool) -> int:
    """The rows of a device, which need not be here, and what a backend must serve for each."""
    here = _is_here(options.backend, device)
    lacking = f"measuring needs {device}, which this machine lacks"
    told = f"without --list they are measured on {device}" if here else lacking
    lines = cells(("operator", "case", "needs"), [(row.operator, row.case, ", ".join(row.needs)) for row in picked])
    sizes = "small" if small else "published"
    listed = [{"operator": row.operator, "case": row.case, "needs": row.needs} for row in picked]
    emit(
        options,
        {"device": device, "is_here": here, "sizes": sizes, "rows": listed},
        f"{lines}\n\n{len(picked)} row{'s' * (len(picked) > 1)} of {sizes} sizes; {told}.",
    )
    return 0


def _is_here(backend: str | None, device: str) -> bool:
    """Of kinds that m3hal can't look for, whether a backend that is asked can, and torch can put tensors there."""
    if devices.kind(device) in devices.KINDS:
        return devices.is_present(device)
    try:
        Runner(backend or Policy.resolve().on(device).backend, device).check_placing()
    except M3halError:
        return False
    return True


def _measured(
    bench: Bench, picked: Sequence[Row], ceilings: dict[str, float], runs: int, apart: bool, quiet: bool
) -> Iterator[Measured]:
    """Each row in turn; progress goes to stderr."""
    for number, row in enumerate(picked, 1):
        begin = time.perf_counter()
        result = measure(bench, row, ceilings, runs, apart)
        if not quiet:
            told = "  ".join(part for part in table.line(result) if part)
            took = time.perf_counter() - begin
            print(f"[{number}/{len(picked)} {took:.1f} s] {told}", file=sys.stderr, flush=True)
        yield result


def measure(bench: Bench, row: Row, ceilings: dict[str, float], runs: int, apart: bool = False) -> Measured:
    """One row: outputs first, then ``runs`` interleaved runs of every candidate; 0: outputs only."""
    try:
        work = row.prepare(bench)
        errors = _checked(work)
        clock.warm(work.calls, bench.device)
        times = clock.measure(work, bench.device, runs, apart) if runs else {}
    except Wrong as error:
        return Measured(row.operator, row.case, "wrong", str(error))
    except Unsupported as error:
        return Measured(row.operator, row.case, "unsupported", str(error))
    except M3halError:  # the request can't be served at all
        raise
    except Exception as error:  # a row's fault ends no table
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return Measured(row.operator, row.case, "failed", f"{type(error).__name__}: {error} ({place})")
    finally:
        clock.wait(bench.device)
    us = clock.medians(times)
    rivals = {name: t for name, t in us.items() if name != "m3hal"}
    best = min(rivals, key=lambda name: rivals[name], default="")
    ours = us.get("m3hal")
    floor = work.floor.microseconds(ceilings) if work.floor and runs else None
    return Measured(
        row.operator,
        row.case,
        "measured" if runs else "checked",
        us=us,
        spread={name: (max(found) - min(found)) / us[name] for name, found in times.items()},
        runs=runs,
        floor_us=floor,
        share=floor / ours if floor and ours else None,
        ratio=rivals[best] / ours if best and ours else None,
        best=best,
        errors=errors,
        peer_absent=work.absent if bench.peer else "",
        facts=work.facts,
    )


def _checked(work: Work) -> dict[str, float]:
    """How far each candidate's output is from the exact one. Raises Wrong beyond the limit."""
    errors = {}
    for name, check in work.checks.items():
        work.calls[name][0]()
        errors[name] = check()
        if not errors[name] <= work.limit:
            raise Wrong(f"the output of {name} is {errors[name]:.3g} from the exact one; the limit is {work.limit:g}")
    return errors


def _told(
    options: argparse.Namespace,
    found: Sequence[Measured],
    written: str,
    machine: dict[str, Any],
    bench: Bench,
    ceilings: dict[str, float],
    command: str,
) -> int:
    if options.json:
        print(written, end="")
    else:
        print(f"{table.text(found)}\n\n{table.footer(found, machine, ceilings, command)}")
    if all(row.status == "unsupported" for row in found):
        if options.json:  # one object: each row has its reason
            return 3
        raise UnsupportedError(
            f"{bench.runner.backend} serves none of these rows on {bench.runner.device}: {found[0].reason}."
        )
    code = 1 if any(row.status in ("wrong", "failed") for row in found) else 0
    if options.png and (code == 0 or any(row.share is not None for row in found)):
        _draw(found, options.png, _title(machine))
    return code
