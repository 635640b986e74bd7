"""Contract tests: adapters to a vendor's library meet the suite on a CPU, on a double of that library.

A double is a package of the library's name whose functions have its signatures and do in torch what its documentation
says, and refuse what it refuses. It shows that an adapter passes the right arguments in the right layout and declares
what the library rounds; it shows nothing about the library's kernels. Claims made so say ``"executor": "double"``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from m3hal import ops
from m3hal.dispatch import M3halError, Verdict
from m3hal.dispatch.discovery import discover
from m3hal.dispatch.levels import digest, proved
from m3hal.dispatch.screen import candidates
from m3hal_conformance.case import make_site
from m3hal_conformance.claim import make_claim
from m3hal_conformance.coverage import cover
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select
from m3hal_conformance.vendor import Question


class DoubleRunner(Runner):
    """Plans for the vendor's device and runs on the CPU."""

    @cached_property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def standing_in(folder: str | Path, library: str, adapters: str) -> Iterator[None]:
    """While it lasts, the package ``library`` is the one in ``folder``, and the package ``adapters`` binds to it.

    Modules of both that were imported before come back afterwards.
    """
    sys.path.insert(0, str(folder))
    before = _forgotten(library, adapters)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _forgotten(library, adapters)
        sys.modules.update(before)


def _forgotten(*packages: str) -> dict[str, ModuleType]:
    """Takes the packages' modules out of ``sys.modules`` and returns them."""
    importlib.invalidate_caches()
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}


def verdicts(backend: str, device: str, operator: str, kind: str = "moe", **site: Any) -> list[Verdict]:
    """What becomes of a backend's implementations of an operator at a bf16 site of MiniMax-M3, the site's values
    replaced; nothing is bound."""
    made = DoubleRunner(backend, device).plan(operator, make_site(kind, "bfloat16", **site))
    return list(made.choice(operator, kind).verdicts)


def ask(runner: Runner, question: Question, *outside: str) -> None:
    """Runs one case. It must pass, or be unsupported for a reason that contains one of ``outside``."""
    result = runner.run_case(question.case)
    told = "\n".join(f"{check.name}: {check.sentence}" for check in result.failed)
    assert result.status != "fail", told
    assert result.status == "pass" or any(reason in result.reason for reason in outside), result.reason


def failures(backend: str, device: str, *ids: str) -> list[str]:
    """The cases among ``ids`` that fail, within :func:`standing_in`: what a wrong double must give."""
    runner = DoubleRunner(backend, device)
    return [result.case for result in runner.run(select(ids=ids)) if result.status == "fail"]


def levels(backend: str, device: str) -> dict[str, str]:
    """``operator: implementation`` -> how far the claims that a backend ships prove it on a device."""
    found = next(found for found in discover() if found.name == backend)
    good, bad = candidates(found, {name: ops.load(name) for name in ops.NAMES}, proved([found], device))
    assert not bad, bad
    return {f"{candidate.operator}: {candidate.label}": candidate.level for candidate in good}


def contract_claim(backend: str, device: str, operators: Iterable[str]) -> dict[str, Any]:
    """The claim of a run of the whole suite on some operators, within :func:`standing_in`."""
    runner = DoubleRunner(backend, device)
    cases = select(operators=tuple(operators))
    results = runner.run(cases)
    coverage, probes = cover(runner, cases, results)
    failed = [probe.case for probe in probes if probe.status == "fail"]
    if failed:
        raise M3halError(f"{backend} declares what it does not do: {', '.join(failed)} failed.")
    body = {**make_claim(runner, cases, results, coverage), "executor": "double"}
    for row in body["results"]:
        row["seconds"] = 0.0  # so that the same files give the same claim
    return {**body, "digest": digest(body)}
