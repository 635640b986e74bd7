"""Version ranges, held against `packaging`'s own answers where it is installed."""

from __future__ import annotations

import itertools

import pytest

from m3hal.dispatch.versions import parse, satisfies

VERSIONS = ["0.9", "1", "1.0", "1.0.0rc1", "1.0.dev3", "1.0.post1", "1.2", "1.10", "2.13.0+cpu", "3.9.0", "2026.1"]
CLAUSES = [">=1", "<2", "==1.0", "!=1.0", "~=1.0", "==1.*", "!=1.*", ">1.0", "<=1.2", "~=2.13.0", "<1", "<1.0rc2"]


@pytest.mark.parametrize(("version", "clause"), list(itertools.product(VERSIONS, CLAUSES)))
def test_agrees_with_packaging(version: str, clause: str) -> None:
    """Every clause on every version, pre-releases admitted; local parts are ignored, as m3hal documents."""
    specifiers = pytest.importorskip("packaging.specifiers", reason="packaging is no dependency of m3hal")
    public = version.partition("+")[0]
    expected = specifiers.SpecifierSet(clause).contains(public, prereleases=True)
    assert satisfies(version, clause) is expected


def test_ranges_are_conjunctions() -> None:
    """All clauses must hold; an empty range takes everything."""
    assert satisfies("1.5", ">=1,<2")
    assert not satisfies("2.0", ">=1,<2")
    assert satisfies("0.1", "")


@pytest.mark.parametrize("text", ["one", ">=", "1.0", "=>1"])
def test_what_is_no_range_is_refused(text: str) -> None:
    """A slip in a manifest is told, not taken for 'anything'."""
    with pytest.raises(ValueError, match="version"):
        satisfies("1.0", text)


def test_order() -> None:
    """Development before alpha before candidate before release before post-release."""
    ordered = ["1.0.dev1", "1.0a1", "1.0b2", "1.0rc1", "1.0", "1.0.post1", "1.0.1", "1.10"]
    shuffled = ordered[3:] + ordered[:3]
    assert sorted(shuffled, key=parse) == ordered
