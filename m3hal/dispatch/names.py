"""Backends as users write them, and the words that mean something else."""

from __future__ import annotations

from dataclasses import dataclass

#: How far an implementation has been proved, least first, in words; computed from claims, never declared. contract: an
#: adapter ran the suite against a double of its vendor's library, so that its arguments, layouts and traits were tried.
LEVEL_WORDS = {
    "declared": "declared: it ships no claim that it ran",
    "contract": "contract-tested, not run on hardware",
    "interpreted": "interpreted on a CPU, not run on hardware",
    "compiled": "compiled, not run on hardware",
    "emulated": "emulated, not run on hardware",
    "hardware": "run on hardware",
}
LEVELS = tuple(LEVEL_WORDS)

#: Words that no backend can be called.
RESERVED = ("auto", "vllm")


@dataclass(frozen=True, order=True)
class BackendName:
    """A backend as users write it: ``name``, or ``distribution:name``."""

    name: str
    distribution: str = ""

    def __str__(self) -> str:
        return f"{self.distribution}:{self.name}" if self.distribution else self.name

    def matches(self, name: str, distribution: str) -> bool:
        """Whether an installed backend is meant. Distribution names compare as pip does."""
        return self.name == name and (
            not self.distribution or normalized(self.distribution) == normalized(distribution)
        )


Order = tuple[BackendName, ...]


def normalized(distribution: str) -> str:
    """A distribution's name as pip compares it."""
    return distribution.lower().replace("_", "-").replace(".", "-")
