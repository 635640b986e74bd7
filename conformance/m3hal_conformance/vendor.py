"""What a vendor's own test file needs: the cases, and one function that asks one.

import pytest
from m3hal_conformance.vendor import ask, cases

@pytest.mark.parametrize("case", cases(operators=["rms_norm"]), ids=str)
def test_conformance(case):
    ask("acme", case)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import pytest

from m3hal import ops
from m3hal.dispatch.devices import detect
from m3hal.dispatch.errors import ConfigurationError, did_you_mean
from m3hal_conformance.case import Case
from m3hal_conformance.runner import Runner, default_threads
from m3hal_conformance.suite import select


@dataclass(frozen=True)
class Question:
    """A case whose ``str`` is its id, for ``pytest.mark.parametrize(ids=str)``."""

    case: Case

    def __str__(self) -> str:
        return self.case.id


def cases(*, operators: Iterable[str] = (), quick: bool = False) -> list[Question]:
    """The cases of some operators, or all."""
    return [Question(case) for case in select(operators=operators, quick=quick)]


def check_asked(backend: str, device: str, operators: Iterable[str]) -> None:
    """Raises M3halError, with a suggestion, for a name that means nothing or a backend that can't be asked here."""
    for name in operators:
        if name not in ops.NAMES:
            raise ConfigurationError(f"{name!r} is no operator.{did_you_mean(name, ops.NAMES)}")
    if backend in ("auto", "vllm"):
        raise ConfigurationError(f"{backend!r} is no backend's name; `m3hal backends` lists the installed ones.")
    case = select(operators=operators)[0]
    _runner(backend, device or detect()[0].device, 0).plan(case.operator, case.site, case.layout)


def ask(backend: str, question: Question, *, device: str = "", seed: int = 0) -> None:
    """Runs one case: fails with every failed check, skips with the reason why it is unsupported."""
    result = _runner(backend, device or detect()[0].device, seed).run_case(question.case)
    if result.status == "unsupported":
        pytest.skip(f"unsupported: {result.reason}")
    if result.status == "fail":
        again = f"m3hal conform --backend {backend} --case {result.case}"
        pytest.fail(
            "\n".join([*(f"{', '.join(names)}: {sentence}" for names, sentence in result.faults), f"again: {again}"]),
            pytrace=False,
        )


@cache
def _runner(backend: str, device: str, seed: int) -> Runner:
    made = Runner(backend, device, seed, default_threads(backend))
    made.check_placing()
    return made
