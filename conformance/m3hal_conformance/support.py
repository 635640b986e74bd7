"""What claims prove for each backend, device, operator and KV format, and on which software: the support matrix.

Nothing is run. A claim counts as far as it is about the installed files and asks what the installed suite asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from m3hal import ops
from m3hal.dispatch import Impl, M3halError, devices
from m3hal.dispatch.discovery import REFERENCE, Found
from m3hal.dispatch.screen import candidates
from m3hal_conformance.case import Case
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import all_cases

#: A claim as its file holds it.
Claim = Mapping[str, Any]
#: of one claim and operator: KV format -> state and passed cases
_States = dict[str, tuple[str, int]]

#: state of a cell -> what it means, the one that is told first where claims differ
STATES = {
    "fails": "a case failed",
    "run": "run on the device: every case of the operator, by the installed files",
    "contract": "contract-tested on a double of the vendor's library, **not run on hardware**",
    "partial": "some cases passed, but not every case that the suite has now was asked",
    "stale": "it ran, with files that have changed since",
    "declared": "offered by the backend; no claim says that it ran",
}
#: KV formats, as a column each; "any": operators that read and write no cache
FORMATS = ("any", "float32", "bfloat16", "fp8_e4m3", "nvfp4", "mxfp4")
_INDEX_ONLY = ("block_scores", "select_blocks", "topk_blocks", "merge_topk")
_EXECUTORS = {"double": "contract", "in-process": "run"}


@dataclass(frozen=True)
class Cell:
    """One backend's operator on one device with one KV format. passed: cases, of whichever claim tells the state.

    require: of a variant, the traits by which it was asked; a backend's ordinary choice is asked for none.
    """

    backend: str
    device: str
    operator: str
    format: str
    state: str
    passed: int = 0
    require: tuple[str, ...] = ()


@dataclass(frozen=True)
class Software:
    """What a backend's claims for a device ran on; several versions where claims differ, "" where they don't say."""

    backend: str
    device: str
    executor: str
    torch: str
    triton: str
    driver: str
    label: str


@dataclass(frozen=True)
class Support:
    """The matrix. engines: runs of whole models, as ``docs/engine-runs.json`` records them."""

    cells: tuple[Cell, ...]
    software: tuple[Software, ...]
    engines: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "states": STATES,
            "cells": [asdict(cell) for cell in self.cells],
            "software": [asdict(row) for row in self.software],
            "engines": list(self.engines),
        }


def support(backends: Iterable[Found], claims: Sequence[Claim], engines: Sequence[Mapping[str, Any]] = ()) -> Support:
    """Of installed backends and of claims about them; a claim about another backend counts for nothing."""
    cells: list[Cell] = []
    software: list[Software] = []
    for found in backends:
        mine = [claim for claim in claims if claim["backend"] == found.name]
        for device in _devices(found, mine):
            cells += _cells(found, device, mine)
            software += _software(found.name, device, mine)
    return Support(tuple(cells), tuple(software), tuple(engines))


def _devices(found: Found, claims: Sequence[Claim]) -> list[str]:
    """Those that the manifest names one by one, and those of claims; the reference's are the claims' alone."""
    named = found.manifest.devices if found.manifest and found.name != REFERENCE else ()
    whole = [name for name in named if not set("*?[") & set(name)]
    return list(dict.fromkeys([*whole, *(claim["device"] for claim in claims if claim["executor"] == "in-process")]))


def _cells(found: Found, device: str, claims: Sequence[Claim]) -> Iterator[Cell]:
    good, _ = candidates(found, {name: ops.load(name) for name in ops.NAMES}, {})
    for operator in ops.NAMES:
        mine = {c.impl_id: c.impl for c in good if c.operator == operator}
        here = {identity: impl for identity, impl in mine.items() if _is_for(impl, device)}
        elsewhere = set(mine) - set(here)
        states: dict[tuple[str, ...], list[_States]] = {(): []}
        for claim in claims:
            if _counts(claim, device):
                asked = states.setdefault(_required(claim, operator), [])
                asked.append(_states(claim, operator, here, elsewhere))
        for require, several in sorted(states.items()):
            for format in FORMATS:
                told = [state[format] for state in several if format in state]
                if told:
                    state, passed = min(told, key=lambda pair: list(STATES).index(pair[0]))
                    yield Cell(found.name, device, operator, format, state, passed, require)
                elif not require and any(_may_store(operator, impl, format) for impl in here.values()):
                    yield Cell(found.name, device, operator, format, "declared")


def _required(claim: Claim, operator: str) -> tuple[str, ...]:
    """The traits by which a claim asked a variant of an operator; those that the operator does not have ask nothing."""
    known = {trait.name for trait in ops.load(operator).traits}
    found = {text.removesuffix("=yes") for text in claim.get("require", ())}
    return tuple(sorted(text for text in found if text.partition("=")[0] in known))


def _is_for(impl: Impl, device: str) -> bool:
    return not impl.devices or devices.matches(device, impl.devices)


def _counts(claim: Claim, device: str) -> bool:
    """A contract holds on every device of the backend; what ran, on the device where it ran."""
    return claim["executor"] == "double" or (claim["executor"] in _EXECUTORS and claim["device"] == device)


def _states(claim: Claim, operator: str, here: Mapping[str, Impl], elsewhere: Set[str]) -> _States:
    """KV format -> state and passed cases of an operator in one claim; formats of which nothing passed are left out.

    here, elsewhere: the installed implementations for the device, and for others of the backend's.
    """
    known = _cases_of(operator)
    rows = [row for row in claim["results"] if row["case"].partition("/")[0] == operator]
    whole = operator in claim["suite"].get("whole_operators", ()) and {row["case"] for row in rows} == set(known)
    found: _States = {}
    for format in FORMATS:
        asked = [row for row in rows if row["case"] in known and format_of(known[row["case"]]) == format]
        mine = [row for row in asked if row["impl_id"] and row["impl_id"] not in elsewhere]
        passed = sum(row["status"] == "pass" for row in mine)
        current = [row for row in mine if _is_current(claim, row, here)]
        if any(row["status"] == "fail" for row in current):
            found[format] = ("fails", passed)
        elif passed and len(current) < len(mine):
            found[format] = ("stale", passed)
        elif passed:
            waived = any(row["status"] == "waived" for row in current)
            found[format] = (_EXECUTORS[claim["executor"]] if whole and not waived else "partial", passed)
    return found


def _is_current(claim: Claim, row: Mapping[str, Any], here: Mapping[str, Impl]) -> bool:
    """Whether the installed files are those that ran. A composition's identity is its plan's."""
    if row["impl_id"] in here:
        return True
    operator = row["case"].partition("/")[0]
    described = claim["implementations"].get(operator, {}).get(row["impl_id"], {})
    if "composition" not in described.get("path", "") or described.get("case") not in _cases_of(operator):
        return False
    require = tuple(claim.get("require", ()))
    return bool(row["impl_id"] == _composed(claim["backend"], claim["device"], described["case"], require))


@cache
def _composed(backend: str, device: str, name: str, require: tuple[str, ...]) -> str:
    """The impl_id of what would run a case here; "" where nothing would."""
    case = _cases_of(name.partition("/")[0])[name]
    try:
        made = Runner(backend, device, require=require).plan(case.operator, case.site, case.layout)
        return made.impl_id(made.choice(case.operator, case.site.kind))
    except M3halError:
        return ""


@cache
def _cases_of(operator: str) -> Mapping[str, Case]:
    return {case.id: case for case in all_cases() if case.operator == operator}


def format_of(case: Case) -> str:
    """The KV format that a case is about: of the index cache where that is the only one, or the one that is stored."""
    if ops.load(case.operator).group != "cache":
        return "any"
    kv, index, plain = case.site.kv_format, case.site.index_format, ("", case.site.dtype)
    format = index if case.operator in _INDEX_ONLY or (kv in plain and index not in plain) else kv
    return {"fp8_e4m3_240": "fp8_e4m3"}.get(format, format)


def _may_store(operator: str, impl: Impl, format: str) -> bool:
    """Whether an implementation's limits let a KV format through."""
    if ops.load(operator).group != "cache":
        return format == "any"
    attribute = "index_format" if operator in _INDEX_ONLY else "kv_format"
    limits = [limit for limit in impl.limits if limit.attribute == attribute]
    is_key = attribute == "kv_format" and format == "mxfp4"  # a format of index keys alone
    return format != "any" and not is_key and not any(limit.refusal(format) for limit in limits)


def _software(backend: str, device: str, claims: Sequence[Claim]) -> Iterator[Software]:
    for executor in _EXECUTORS:
        mine = [c["environment"] for c in claims if c["executor"] == executor and _counts(c, device)]
        if mine:
            names = ("torch", "triton", "driver", "device_label")
            told = [", ".join(dict.fromkeys(one[name] for one in mine if one.get(name))) for name in names]
            yield Software(backend, device, executor, *told)
