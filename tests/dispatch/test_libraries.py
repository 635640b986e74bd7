"""Which versions of vendors' libraries are installed, and whether they fit."""

from __future__ import annotations

import importlib.metadata

import pytest

from m3hal.dispatch import Manifest
from m3hal.dispatch.libraries import Library, libraries

MANIFEST = Manifest(
    "acme", "Acme", ">=1,<2", ("cpu",), {}, libraries={"pytest": ">=7", "no-such-library": ">=1,<2", "stevedore": "<1"}
)


def test_versions_and_ranges() -> None:
    """Each library by name, wanted range and installed version; what is absent or out of range has a remedy."""
    fits, absent, old = libraries(MANIFEST)
    assert fits == Library("pytest", ">=7", importlib.metadata.version("pytest"))
    assert fits.problem is None
    assert str(absent) == "no-such-library absent (>=1,<2)"
    assert "pip install 'no-such-library>=1,<2'" in str(absent.problem)
    assert str(old.problem).startswith("it needs stevedore <1; ")
    assert libraries(None) == ()


def test_a_version_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not say a version can't be compared, which is told."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "unknown")
    assert "can't be compared" in str(libraries(MANIFEST)[0].problem)
