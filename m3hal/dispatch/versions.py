"""Version ranges such as ``">=1,<2"``: the part of PEP 440 that manifests need, without a dependency."""

from __future__ import annotations

import re

_VERSION = re.compile(r"v?(?:\d+!)?(\d+(?:\.\d+)*)[._-]?(a|b|rc|alpha|beta|c|pre|preview|dev|post)?[._-]?(\d*)")
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|~=|>|<)\s*([0-9A-Za-z.!+_-]+?)(\.\*)?\s*")

#: A pre-release sorts before its release, a post-release after it.
_RANK = {"dev": -4, "a": -3, "alpha": -3, "b": -2, "beta": -2, "rc": -1, "c": -1, "pre": -1, "preview": -1, "post": 1}

Key = tuple[tuple[int, ...], int, int]


def parse(version: str) -> Key:
    """A key that sorts versions; ``+local`` suffixes are ignored. Raises ValueError for what is no version."""
    match = _VERSION.match(version.strip().lower())
    if match is None:
        raise ValueError(f"{version!r} is not a version")
    release = [int(part) for part in match[1].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    return tuple(release), _RANK.get(match[2] or "", 0), int(match[3] or 0)


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version lies in a range; an empty range takes all. Raises ValueError for what is no range."""
    return all(_holds(version, clause) for clause in wanted.split(",") if clause.strip())


def _holds(version: str, clause: str) -> bool:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise ValueError(f"{clause.strip()!r} is not a version range; write e.g. '>=1,<2'")
    operator, bound, wildcard = match[1], match[2], match[3]
    if wildcard:
        length = len(bound.split("."))
        same = _release(version, length) == _release(bound, length)
        return same if operator == "==" else not same
    have, want = parse(version), parse(bound)
    if operator == "~=":
        length = max(len(bound.split(".")) - 1, 1)
        return have >= want and _release(version, length) == _release(bound, length)
    same, released = have[0] == want[0], want[1] == 0
    return {
        ">=": have >= want,
        "<=": have <= want,
        ">": have > want and not (same and released and have[1] > 0),  # a post-release of the bound is the bound
        "<": have < want and not (same and released),  # and its pre-release is no version before it
        "==": have == want,
        "!=": have != want,
    }[operator]


def _release(version: str, length: int) -> tuple[int, ...]:
    match = _VERSION.match(version.strip().lower())
    if match is None:
        raise ValueError(f"{version!r} is not a version")
    parts = [int(part) for part in match[1].split(".")]
    return tuple((parts + [0] * length)[:length])
