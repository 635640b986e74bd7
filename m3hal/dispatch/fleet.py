"""Tables by device inside a configuration, so that one file serves a mixed fleet.

    backend = "auto"                     # on every device that has no table, or whose table doesn't say

    [devices."cuda:sm_90"]
    backend = "triton,reference"

    [devices."hip:*"]
    backend = "amd,reference"
    min_level = "contract"

Of a carrier, a device's own table comes before a pattern's, the longer pattern before the shorter, of two as long the
first, and every table before the keys outside of tables. What pins a plan hides the keys that it stands before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from m3hal.dispatch import carriers, devices
from m3hal.dispatch.carriers import Carrier, Origin
from m3hal.dispatch.errors import ConfigurationError, did_you_mean

KEY = "devices"
_WILD = re.compile(r"[*?\[]")


def has_tables(sources: Sequence[Carrier]) -> bool:
    """Whether any carrier says something about a device."""
    return any(KEY in values for _, values in sources)


def for_device(sources: Sequence[Carrier], device: str | None) -> list[Carrier]:
    """The carriers, each with its tables for the device before its other keys; None: without tables."""
    found: list[Carrier] = []
    for name, values in sources:
        tables = values.get(KEY, {}) if device is not None else {}
        own = [(_told(name, pattern), dict(tables[pattern])) for pattern in _matching(tables, device or "")]
        found += _pinned([*own, (name, {key: value for key, value in values.items() if key != KEY})])
    return found


def _pinned(tables: list[Carrier]) -> list[Carrier]:
    """One carrier's, without what stands behind a table that pins a plan: that decides all that the others would."""
    pins = [bool(table.get("plan")) for _, table in tables]
    first = pins.index(True) if True in pins else len(tables)
    behind = [(name, {k: v for k, v in table.items() if k in carriers.BESIDE_A_PIN}) for name, table in tables]
    return [*tables[: first + 1], *behind[first + 1 :]]


def check(sources: Sequence[Carrier]) -> None:
    """Raises ConfigurationError for a table that no device can match, or whose keys or values mean nothing.

    Tables for devices that this machine lacks are checked too: a slip should not wait for the machine that has one.
    """
    for name, values in sources:
        tables = values.get(KEY, {})
        if not isinstance(tables, Mapping):
            raise ConfigurationError(f"{KEY!r} from {name} must map devices to tables of keys; got {tables!r}.")
        for pattern, table in tables.items():
            if not isinstance(table, Mapping):
                raise ConfigurationError(f"{_told(name, pattern)} must be a table of keys; got {table!r}.")
            if KEY in table:
                raise ConfigurationError(f"{_told(name, pattern)} holds {KEY!r} itself; put its tables one level up.")
            _check_pattern(pattern, name)
            flat = carriers.flattened(dict(table), _told(name, pattern))
            carriers.fields_of({key: Origin(value, _told(name, pattern)) for key, value in flat.items()})


def _told(carrier: str, pattern: str) -> str:
    return f"{KEY}.{pattern!r} of {carrier}"


def _matching(tables: Mapping[str, Any], device: str) -> list[str]:
    """The patterns that a device matches, the most specific first."""
    found = [pattern for pattern in tables if devices.matches(device, [pattern])]
    return sorted(found, key=lambda pattern: (bool(_WILD.search(pattern)), -len(pattern)))


def _check_pattern(pattern: str, carrier: str) -> None:
    """A kind that m3hal knows has architectures of a known form; another kind is a third party's, or a slip."""
    kind, colon, architecture = pattern.partition(":")
    if _WILD.search(kind) or pattern == "cpu":
        return
    if kind in devices.ARCHITECTURES:
        form, example = devices.ARCHITECTURES[kind]
        if form.fullmatch(architecture) or _may_match(architecture, example.partition(":")[2]):
            return
    meant = devices.meant(pattern)
    if meant is None and colon and architecture:
        return
    hint = f" Did you mean {meant!r}?" if meant else did_you_mean(pattern, devices.EXAMPLES)
    raise ConfigurationError(f"{pattern!r} in {KEY!r} from {carrier} is no device.{hint}")


def _may_match(pattern: str, example: str) -> bool:
    """Whether an architecture that is called like the example, ``sm_90``, can match a pattern with wildcards."""
    before = _WILD.split(pattern)[0]
    stem = example.rstrip("0123456789")
    return before != pattern and ":" not in pattern and (before.startswith(stem) or stem.startswith(before))
