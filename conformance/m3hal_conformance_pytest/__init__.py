"""``pytest --pyargs m3hal_conformance --m3hal-backend=acme``: the cases of ``m3hal conform``, as tests.

A package of its own, because pytest imports it in every run of an environment that has it, and this one needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of ``m3hal conform``, where pytest has none of its own."""
    group = parser.getgroup("m3hal", "MiniMax-M3 operator conformance")
    group.addoption("--m3hal-backend", help="the backend to ask")
    group.addoption("--m3hal-device", default="", help="its device; this machine's first when left out")
    group.addoption("--m3hal-op", action="append", default=[], help="only this operator's cases; may be repeated")
    group.addoption("--m3hal-quick", action="store_true", help="the small cases only")
    group.addoption("--m3hal-seed", type=int, default=0, help="other numbers of the same structure")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test per case, for functions that take ``m3hal_question``."""
    if "m3hal_question" not in metafunc.fixturenames:
        return
    from m3hal_conformance.vendor import cases

    option = metafunc.config.getoption
    asked = cases(operators=option("m3hal_op"), quick=option("m3hal_quick")) if option("m3hal_backend") else []
    metafunc.parametrize("m3hal_question", asked, ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One sentence instead of a failure per case when the options mean nothing, or the backend can't be asked here."""
    if not any("m3hal_question" in getattr(item, "fixturenames", ()) for item in items):
        return
    import pytest

    option = config.getoption
    if not option("m3hal_backend"):
        raise pytest.UsageError("these tests ask a backend, and need its name: --m3hal-backend=NAME.")
    from m3hal_conformance.vendor import check_asked

    from m3hal.dispatch.errors import M3halError

    try:
        check_asked(option("m3hal_backend"), option("m3hal_device"), option("m3hal_op"))
    except M3halError as error:
        raise pytest.UsageError(str(error)) from None
