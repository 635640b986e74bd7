"""Makes a plan and says why it is what it is: for the published MiniMax-M3 on this machine, unless told otherwise.

With an operator it shows the verdict on every implementation; without, also what each backend has for the device, how
far that is proved, and why there is not more. The device need not be in this machine:

    m3hal explain sparse_attention --device hip:gfx950 --backend amd,reference

`m3hal plan` writes the plan to a file, to pin or to compare it. Exits with 3 when vLLM's in-tree model would stay
because nothing supports the device.
"""

from __future__ import annotations

import argparse
from typing import Any

from m3hal import ops
from m3hal.cli._matrix import matrix, offers, withheld
from m3hal.cli._planning import add_planning, left_in_tree, planned
from m3hal.cli.output import emit
from m3hal.dispatch import Plan
from m3hal.dispatch.errors import ConfigurationError, did_you_mean
from m3hal.dispatch.planner import VLLM_HOLDS

HELP = "which implementation serves each operator, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The operator, and what to plan."""
    parser.add_argument("operator", nargs="?", metavar="OP", help="show the verdicts on this operator")
    add_planning(parser)


def run(arguments: argparse.Namespace) -> int:
    """Passes when the plan serves the model."""
    if arguments.operator is not None and arguments.operator not in (*ops.NAMES, *VLLM_HOLDS):
        hint = did_you_mean(arguments.operator, ops.NAMES)
        raise ConfigurationError(f"{arguments.operator!r} is no operator.{hint}")
    made = planned(arguments)
    emit(arguments, _data(made, arguments.operator), _text(made, arguments.operator))
    return 3 if left_in_tree(made) else 0


def _text(made: Plan, operator: str | None) -> str:
    """The explanation, which has no row for an operator that stays inside vLLM's own model."""
    if operator and made.in_tree and operator not in {choice.operator for choice in made.choices}:
        return f"{made.table()}\n\n{operator}: vLLM's own model serves it; m3hal dispatches nothing"
    more = withheld(made, operator) if operator else matrix(made, offers(made))
    return "\n\n".join(filter(None, [made.explain(operator), more]))


def _data(made: Plan, operator: str | None) -> dict[str, Any]:
    data = made.to_json()
    if operator is not None:
        return data | {"choices": [row for row in data["choices"] if row["operator"] == operator]}
    return data | {"offers": [offer.to_json() for offer in offers(made)]}
