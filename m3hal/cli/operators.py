"""Lists the operators, or shows one: signature, definition, numeric class, traits, source, who implements it."""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any

from m3hal import ops
from m3hal.cli.output import emit
from m3hal.dispatch.discovery import discover
from m3hal.dispatch.errors import ConfigurationError, did_you_mean
from m3hal.dispatch.table import table

HELP = "the operators and their definitions"

_NUMERIC = {
    "X": "bit-exact",
    "U1": "within one unit in the last place of the output's dtype",
    "C1": "within one code step",
    "R": "worst-row relative L2 error within a derived bound",
    "S": "a selection, compared by score regret",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The operator to show."""
    parser.add_argument("operator", nargs="?", metavar="OP", help="show this one")


def run(arguments: argparse.Namespace) -> int:
    """Passes when the operator exists."""
    if arguments.operator is None:
        found = [_data(ops.load(name)) for name in ops.NAMES]
        rows = [(r["name"], r["kind"], r["numeric"]["class"], r["summary"]) for r in found]
        emit(arguments, {"operators": found}, table(("operator", "kind", "numeric", "summary"), rows))
        return 0
    if arguments.operator not in ops.NAMES:
        hint = did_you_mean(arguments.operator, ops.NAMES)
        raise ConfigurationError(f"{arguments.operator!r} is no operator.{hint}")
    operator = ops.load(arguments.operator)
    data = _data(operator) | {"implemented_by": _implementers(operator.name)}
    emit(arguments, data, _page(data))
    return 0


def _data(operator: ops.Operator) -> dict[str, Any]:
    module = inspect.getdoc(sys.modules[operator.reference.__module__]) or ""
    return {
        "name": operator.name,
        "kind": operator.kind,
        "summary": " ".join(module.partition("\n\n")[0].split()),
        "signature": _signature(operator),
        "definition": module,
        "docstring": inspect.getdoc(operator.reference) or "",
        "inputs": list(operator.inputs),
        "statics": list(operator.statics),
        "optional": list(operator.optional),
        "mutates": list(operator.mutates),
        "numeric": {
            "class": operator.numeric.kind,
            "meaning": _NUMERIC[operator.numeric.kind],
            "note": operator.numeric.note,
        },
        "traits": [
            {"name": t.name, "values": list(t.values), "emulated": t.emulated, "meaning": t.meaning}
            for t in operator.traits
        ],
        "sites": list(operator.sites),
        "group": operator.group,
        "covers": list(operator.covers),
        "source": operator.source,
    }


def _signature(operator: ops.Operator) -> str:
    """As an implementation sees it: the reference's own ``traits`` argument is no part of the contract."""
    signature = inspect.signature(operator.reference)
    kept = [
        parameter.replace(annotation=_plain(parameter.annotation))
        for parameter in signature.parameters.values()
        if parameter.name != "traits"
    ]
    returns = _plain(signature.return_annotation)
    return f"{operator.name}({', '.join(map(str, _with_star(kept)))}) -> {returns}".replace("'", "")


def _plain(annotation: Any) -> Any:
    return annotation.replace("torch.", "") if isinstance(annotation, str) else annotation


def _with_star(parameters: list[inspect.Parameter]) -> list[object]:
    first = next((i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    return list(parameters) if first is None else [*parameters[:first], "*", *parameters[first:]]


def _implementers(operator: str) -> list[str]:
    return [str(found) for found in discover() if found.manifest and operator in found.manifest.operators]


def _page(data: dict[str, Any]) -> str:
    numeric = data["numeric"]
    facts = [
        ("kind", f"{data['kind']} operator, runs at {', '.join(data['sites'])}"),
        ("numeric", f"{numeric['class']}: {numeric['meaning']}" + (f"; {numeric['note']}" if numeric["note"] else "")),
        ("mutates", ", ".join(data["mutates"])),
        ("group", f"{data['group']}: chosen together with the operators that share its bytes" if data["group"] else ""),
        ("covers", ", ".join(data["covers"])),
        ("source", data["source"]),
        ("backends", ", ".join(data["implemented_by"]) or "none installed"),
    ]
    parts = [data["signature"], data["definition"], data["docstring"]]
    parts.append("\n".join(f"{name:<9} {value}" for name, value in facts if value))
    if data["traits"]:
        rows = [
            (t["name"], " | ".join(t["values"]), "yes" if t["emulated"] else "no", t["meaning"]) for t in data["traits"]
        ]
        parts.append(table(("trait", "values, exact first", "emulated", "meaning"), rows))
    return "\n\n".join(parts)
