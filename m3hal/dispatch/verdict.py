"""Why something was taken or refused: the unit that plans are explained with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Stage = Literal[
    "discover",
    "policy",
    "import",
    "manifest",
    "api",
    "device",
    "library",
    "probe",
    "limits",
    "predicate",
    "traits",
    "level",
    "layout",
    "coverage",
    "chosen",
]

#: In the order in which they are asked. ``manifest``: the manifest says something that can't be. ``chosen``: every
#: stage was passed.
STAGES: tuple[Stage, ...] = Stage.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Verdict:
    """Accepted, or rejected at a stage for a reason.

    backend, distribution: whom it is about. operator, site, impl: empty when it is about the whole backend.
    """

    stage: Stage
    accepted: bool
    reason: str
    backend: str
    distribution: str = ""
    operator: str = ""
    site: str = ""
    impl: str = ""

    def __str__(self) -> str:
        outcome = "accepted" if self.accepted else f"rejected at {self.stage}"
        label = f" {self.impl}" if self.impl not in ("", self.operator) else ""
        return f"{self.backend}{label}: {outcome}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """The fields that are set."""
        return {key: value for key, value in vars(self).items() if value != ""}
