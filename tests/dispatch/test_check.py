"""Ladders, and the manifest as a whole; lies of single implementations are tried in test_hostile_distributions.py."""

from __future__ import annotations

import pytest

from m3hal.dispatch import M3halError, Manifest, Rung, register
from m3hal.dispatch.check import gap_in_ladder, problem_of

GOOD = {"name": "acme", "vendor": "toy", "api": ">=1,<2", "devices": ("*",), "operators": {}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"name": "Acme Kernels"}, "lower-case letters"),
        ({"operators": ()}, "must map an operator's name"),
        ({"vendor": object()}, "its vendor is a object; it must be a name"),
        ({"devices": "cpu"}, "must be a tuple of patterns"),
        ({"devices": ()}, "must be a tuple of patterns"),
        ({"priority": "high"}, "must be a whole number"),
        ({"probe": "m3hal_acme.probe"}, "must read 'module:function'"),
        ({"libraries": ("torch",)}, "must map a distribution's name"),
        ({"api": "1.0"}, "its api is no version range"),
        ({"api": None}, "its api is None; it must be a version range"),
        ({"libraries": {"torch": "2"}}, r"its libraries\['torch'\] is no version range"),
    ],
)
def test_manifests_that_can_not_be(changes: dict[str, object], problem: str | None) -> None:
    """A wrong type or form is told in words; registering such a manifest raises the same."""
    manifest = Manifest(**{**GOOD, **changes})  # type: ignore[arg-type]
    if problem is None:
        assert problem_of(manifest) is None
        return
    with pytest.raises(M3halError, match=problem):
        register(manifest)


@pytest.mark.parametrize("name", ["auto", "vllm", "reference"])
def test_reserved_names(name: str) -> None:
    """Words of the configuration, and m3hal's own backend, can't be taken."""
    with pytest.raises(M3halError, match=name):
        register(Manifest(**{**GOOD, "name": name}))  # type: ignore[arg-type]


DECODE = Rung("decode", ("decode", "verify"), 0, 16)
WIDE = Rung("wide", ("decode", "verify"), 17)
PREFILL = Rung("prefill", ("prefill",))


@pytest.mark.parametrize(
    ("rungs", "gap"),
    [
        ((), None),
        ((Rung("all"),), None),
        ((PREFILL, DECODE, WIDE), None),
        ((WIDE, DECODE, PREFILL), None),
        ((DECODE, WIDE), "no prefill rung for 0 to 1024 tokens"),
        ((PREFILL, DECODE), "no decode rung for 17 to 1024 tokens"),
        ((PREFILL, WIDE), "no decode rung for 0 to 16 tokens"),
        ((PREFILL, DECODE, Rung("wide", ("decode", "verify"), 20)), "no decode rung for 17 to 19 tokens"),
        ((PREFILL, DECODE, Rung("wide", ("decode", "verify"), 16)), "two decode rungs for 16 tokens"),
        ((Rung("all", max_tokens=1023),), "no prefill rung for 1024 to 1024 tokens"),
        ((Rung("all", max_tokens=1024),), None),
    ],
)
def test_ladder_covers_every_count_once(rungs: tuple[Rung, ...], gap: str | None) -> None:
    """0 to max_tokens, in each phase, without holes or overlaps."""
    found = gap_in_ladder(rungs, 1024)
    assert found == (None if gap is None else f"its ladder has {gap}")
