"""Collected by ``pytest --pyargs m3hal_conformance --m3hal-backend=NAME``."""

from __future__ import annotations

import pytest

from m3hal_conformance.vendor import Question, ask


def test_case(m3hal_question: Question, request: pytest.FixtureRequest) -> None:
    """The backend computes the operator."""
    option = request.config.getoption
    ask(option("m3hal_backend"), m3hal_question, device=option("m3hal_device"), seed=option("m3hal_seed"))
