"""``m3hal conform``: the part that needs torch. The command line's own file only parses."""

from __future__ import annotations

import argparse
import datetime
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence

from m3hal import ops
from m3hal._files import write_whole
from m3hal.dispatch import Policy, admission, devices
from m3hal.dispatch.devices import detect
from m3hal.dispatch.errors import ConfigurationError, M3halError, UnsupportedError, did_you_mean
from m3hal_conformance import jobs, placing, reports
from m3hal_conformance.case import DTYPES, Case
from m3hal_conformance.checks import CHECKS
from m3hal_conformance.claim import make_claim
from m3hal_conformance.composed import check_layer
from m3hal_conformance.coverage import cover
from m3hal_conformance.harness import torch_threads
from m3hal_conformance.page import page
from m3hal_conformance.results import (
    Result,
    Waiver,
    WaiverError,
    apply_waivers,
    concerning,
    exit_code,
    nowhere,
    read_waivers,
    unused,
)
from m3hal_conformance.runner import Runner, default_threads
from m3hal_conformance.suite import all_cases, select

#: what a case may fail by without being asked it: its manifest, its factory, a whole layer
_OTHER_CHECKS = ("manifest", "bind", "composed", "regret")


#: beyond what any machine has; torch takes any number until its first parallel loop
_MOST_THREADS = 4096


def conform(options: argparse.Namespace) -> int:
    """Runs the suite against a backend and writes what was asked for. Exit codes 0, 1, 2, 3 as in ``exit_code``."""
    if options.list:
        named_device(options.device, options.backend)
        print("\n".join(case.id for case in _cases(options)))
        return 0
    device = device_of(options.device, options.backend)
    backend = _backend(options.backend, device)
    threads = default_threads(backend) if options.threads is None else options.threads
    if not 1 <= threads <= _MOST_THREADS:
        raise ConfigurationError(f"--threads takes 1 to {_MOST_THREADS}, not {threads}.")
    if options.jobs < 1:
        raise ConfigurationError(f"--jobs takes 1 or more, not {options.jobs}.")
    runner = Runner(backend, device, options.seed, threads, required(options))
    cases = _cases(options)
    runner.plan(cases[0].operator, cases[0].site, cases[0].layout)  # an unusable backend is an error, not 600 results
    runner.check_placing()
    check_writable(options, "json", "junit", "html")
    told = _waivers(options)
    waivers = concerning(told, runner.device)
    results = jobs.run(runner, cases, options.jobs, reports.Progress(len(cases)))
    coverage, extra = cover(runner, cases, results)
    if not options.op and not options.case:
        extra += runner.nameless()
        with torch_threads(1):
            extra += [check_layer(runner, dtype) for dtype in DTYPES]
    everything = apply_waivers([*results, *extra], waivers, datetime.date.today())
    claim = make_claim(runner, cases, everything[: len(cases)], coverage)
    print(reports.terminal(claim, everything, selected=bool(options.op or options.case)))
    for waiver in unused(waivers, everything):
        print(f"note: the waiver of {waiver.case} ({waiver.issue}) meets no case that ran")
    for waiver in nowhere(told, runner.device):
        print(f"note: the waiver of {waiver.case} ({waiver.issue}) is for {waiver.device!r}, which no known device is")
    _write(options, claim, everything)
    return exit_code(everything)


def _backend(name: str | None, device: str) -> str:
    """What ``--backend`` or the policy names; a suite must know whom it asks."""
    asked = Policy.resolve().on(device).backend if name is None else name
    if asked in ("auto", "vllm"):
        raise ConfigurationError(
            "conform asks one backend, and needs its name: --backend NAME; `m3hal backends` lists the installed ones."
        )
    return asked


def device_of(device: str | None, backend: str | None = None) -> str:
    """``--device``, or this machine's first. Refuses what is no device, or is not here: no case fails for that.

    Of kinds that m3hal can't look for, ``Runner.check_placing`` tells later whether they are here.
    """
    named = named_device(device, backend)
    if device is not None and not devices.is_present(named):
        here = ", ".join(dict.fromkeys(found.device for found in detect()))
        raise UnsupportedError(
            f"this machine has no {device}, so nothing can be asked there. It has: {here}. "
            f"`m3hal explain --device {device}` plans for it anyway, `m3hal bench --device {device} --list` names "
            "its rows, and `m3hal bench --read FILE` prints a table that was measured there."
        )
    return named


def named_device(device: str | None, backend: str | None = None) -> str:
    """The same, of any machine: refuses only a kind that neither m3hal, torch nor an admitted backend's manifest names.

    backend: as ``--backend`` names it; None: what the policy admits.
    """
    if device is None:
        return detect()[0].device
    kind = devices.kind(devices.check(device))
    if kind in devices.KINDS or placing.is_kind_of_torch(device):
        return device
    others = admission.further_kinds(Policy.resolve({"backend": backend} if backend else {}).on(device))
    if devices.matches(kind, others):
        return device
    meant = devices.meant(device)
    hint = f" Did you mean {meant!r}?" if meant else ""
    raise ConfigurationError(
        f"{device!r} is of no kind that m3hal, torch or the manifest of a backend that is asked names: "
        f"{', '.join([*devices.KINDS, *others])}. A manifest names one as devices=({kind + ':*'!r},); "
        f"`m3hal devices` lists what this machine has.{hint}"
    )


def required(options: argparse.Namespace) -> tuple[str, ...]:
    """``--require``, each trait once; whether traits are called so is the plan's to say."""
    if "" in options.require:
        raise ConfigurationError("--require takes a trait, such as batch_invariant, and got none.")
    return tuple(dict.fromkeys(options.require))


def _cases(options: argparse.Namespace) -> tuple[Case, ...]:
    for name in options.op:
        if name not in ops.NAMES:
            raise ConfigurationError(f"{name!r} is no operator.{did_you_mean(name, ops.NAMES)}")
    for name in options.case:
        if not select(ids=[name]):
            raise ConfigurationError(
                f"no case is called {name!r}.{_near(name)} `m3hal conform --backend reference --list` prints every id."
            )
    cases = select(operators=options.op, ids=options.case, quick=options.quick)
    if not cases:
        raise ConfigurationError("no case meets all of --op, --case and --quick; leave one of them out.")
    return cases


def _near(name: str) -> str:
    """Questions and cases whose id is much like ``name``; the operators, which ids begin with, when there is none."""
    ids = [case.id for case in all_cases()]
    near = difflib.get_close_matches(name, sorted({*ids, *(i.rpartition("/")[0] for i in ids)}), n=3, cutoff=0.7)
    if near:
        return f" Near it: {', '.join(near)}."
    return f" Ids begin with an operator: {', '.join(dict.fromkeys(case.operator for case in all_cases()))}."


def _waivers(options: argparse.Namespace) -> tuple[Waiver, ...]:
    """Those of the file, for whatever device."""
    try:
        return read_waivers(options.waivers, (*CHECKS, *_OTHER_CHECKS)) if options.waivers else ()
    except WaiverError as error:
        raise ConfigurationError(str(error)) from error


def check_writable(options: argparse.Namespace, *named: str) -> None:
    """Refuses, before anything runs, a file that could not be written when it is over. named: the options."""
    taken: dict[str, str] = {}
    for option in named:
        asked = getattr(options, option)
        if asked is None:
            continue
        other = taken.setdefault(os.path.realpath(asked), option)
        if other != option and (os.path.isfile(asked) or not os.path.exists(asked)):
            raise ConfigurationError(f"--{other} and --{option} name one file, {asked}; one would replace the other.")
        folder = os.path.dirname(asked) or "."
        if os.path.isdir(asked) or not asked:
            raise ConfigurationError(f"--{option} takes a file, and {asked!r} is a folder.")
        if not os.path.isdir(folder):
            raise ConfigurationError(f"--{option} {asked}: there is no folder {folder}; make it first.")
        if os.path.exists(asked) and not os.access(asked, os.W_OK):
            raise ConfigurationError(f"--{option} {asked} can't be written; you lack the permission.")
        beside = os.path.dirname(os.path.realpath(asked))  # where it is written before it is renamed
        if (os.path.isfile(asked) or not os.path.exists(asked)) and not os.access(beside, os.W_OK):
            raise ConfigurationError(f"--{option} {asked} can't be written: you lack the permission for {beside}.")


def _write(options: argparse.Namespace, claim: dict[str, object], results: Sequence[Result]) -> None:
    texts: tuple[tuple[str | None, Callable[[], str]], ...] = (
        (options.json, lambda: json.dumps(claim, indent=1) + "\n"),
        (options.junit, lambda: reports.junit(claim, results)),
        (options.html, lambda: page(claim, results)),
    )
    for path, text in texts:
        if path:
            write(path, text())
            print(f"wrote {path}", file=sys.stderr)


def write(path: str, text: str) -> None:
    """Writes a file whole. Raises M3halError with a sentence."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise M3halError(f"{path} can't be written: {error.strerror or error}.") from error
