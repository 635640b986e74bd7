"""What differs between two exported plans: device, policy, sites, layouts, implementations and what they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from m3hal.dispatch.table import table

#: An exported plan, as :meth:`m3hal.Plan.to_json` gives it.
Exported = Mapping[str, Any]

_NOTHING = "nothing"
#: keys of a row of the plan
_ROW = ("impl_id", "level", "traits", "rungs", "version")
#: what can differ although the same implementations are planned for the same device and policy
_BESIDE = ("versions", "site", "level", "version")


@dataclass(frozen=True)
class Difference:
    """about: "device", "versions", an operator with its sites. what: the part of it that differs."""

    about: str
    what: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.about}{': ' if self.what else ''}{self.what} was {self.was}, is {self.now}"

    @property
    def decides(self) -> bool:
        """Whether the plans' fingerprints know it."""
        return self.what not in _BESIDE and self.about.partition(" ")[0] not in _BESIDE


def differences(old: Exported, new: Exported) -> list[Difference]:
    """Everything, in the order in which one would ask; sites with one outcome are one row."""
    return [
        *_values("device", {"": old.get("device")}, {"": new.get("device")}),
        *_values("vLLM's own model serves", {"": old.get("in_tree", False)}, {"": new.get("in_tree", False)}),
        *_values("policy", old.get("policy", {}), new.get("policy", {})),
        *_sites(old.get("sites", {}), new.get("sites", {})),
        *_values("cache layout", layouts(old), layouts(new)),
        *_merged(_rows(old, new)),
        *_values("versions", old.get("versions", {}), new.get("versions", {})),
    ]


def layouts(plan: Exported) -> dict[str, str]:
    """site -> cache layout."""
    return {site: entry["layout"] for site, entry in plan.get("layouts", {}).items()}


def servers(plan: Exported) -> dict[tuple[str, str], str]:
    """(operator, site) -> who serves it, with the implementation's name."""
    return {
        (row["operator"], row["site"]): f"{row['server']} {row.get('impl', '')}".strip()
        for row in plan.get("choices", ())
    }


def differences_table(found: Iterable[Difference], names: tuple[str, str], width: int | None = None) -> str:
    """For people."""
    return table(("what", "part", *names), [(d.about, d.what, d.was, d.now) for d in found], width)


def _rows(old: Exported, new: Exported) -> Iterator[tuple[str, str, Difference]]:
    """(operator, site, what differs)."""
    before, after = servers(old), servers(new)
    was_rows, now_rows = _by_place(old), _by_place(new)
    for place in dict.fromkeys([*before, *after]):
        parts = [("", before.get(place, _NOTHING), after.get(place, _NOTHING))]
        if place in was_rows and place in now_rows:
            keys = _ROW if parts[0][1] == parts[0][2] else _ROW[1:]  # another server's impl_id says nothing more
            parts += [(key, _said(was_rows[place].get(key)), _said(now_rows[place].get(key))) for key in keys]
        for what, was, now in parts:
            if was != now:
                yield *place, Difference("", what, was, now)


def _merged(rows: Iterable[tuple[str, str, Difference]]) -> list[Difference]:
    sites: dict[tuple[str, Difference], list[str]] = {}
    for operator, site, found in rows:
        sites.setdefault((operator, found), []).append(site)
    return [
        Difference(f"{operator} at {', '.join(at)}" if any(at) else operator, found.what, found.was, found.now)
        for (operator, found), at in sites.items()
    ]


def _by_place(plan: Exported) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(row["operator"], row["site"]): row for row in plan.get("choices", ())}


def _sites(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    """The static values that differ; a site that one plan lacks is one row."""
    for kind in dict.fromkeys([*old, *new]):
        if kind in old and kind in new:
            yield from _values(f"site {kind}", old[kind], new[kind])
        else:
            yield Difference(f"site {kind}", "", *("there" if kind in side else _NOTHING for side in (old, new)))


def _values(about: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            yield Difference(about, str(key), _said(old.get(key)), _said(new.get(key)))


def _said(value: Any) -> str:
    """A value of a plan in words; nothing for an absent one and for an empty collection."""
    if isinstance(value, Mapping):
        value = [f"{key}={inner}" for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return _NOTHING if value in (None, "") else ("yes" if value else "no") if isinstance(value, bool) else str(value)
