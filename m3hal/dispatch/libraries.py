"""The vendors' libraries that a manifest asks for, and which versions of them are installed."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict, dataclass
from typing import Any

from m3hal.dispatch import versions
from m3hal.dispatch.manifest import Manifest


@dataclass(frozen=True)
class Library:
    """A distribution that a backend calls. wanted: a version range. installed: "" when it is not."""

    name: str
    wanted: str
    installed: str

    def __str__(self) -> str:
        return f"{self.name} {self.installed or 'absent'} ({self.wanted or 'any'})"

    @property
    def problem(self) -> str | None:
        """Why a backend that needs it can't be used, with the remedy; None when it fits."""
        if not self.installed:
            return f"it needs {self.name} {self.wanted}, which is not installed; pip install '{self.name}{self.wanted}'"
        try:
            fits = versions.satisfies(self.installed, self.wanted)
        except ValueError:
            said = f"the installed one says its version is {self.installed!r}, which can't be compared"
            return f"it needs {self.name} {self.wanted}; {said}"
        return None if fits else f"it needs {self.name} {self.wanted}; {self.installed} is installed"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def libraries(manifest: Manifest | None) -> tuple[Library, ...]:
    """A manifest's libraries, in its order."""
    wanted = manifest.libraries if manifest else {}
    return tuple(Library(name, range_, _installed(name)) for name, range_ in wanted.items())


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
