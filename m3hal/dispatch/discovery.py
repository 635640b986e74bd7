"""Finds backends through the entry-point group ``m3hal.backends``: the one module that knows stevedore.

stevedore's own listing is replaced: its cache on disk goes stale and drops which distribution an entry point belongs
to. One manager is made per entry point, so that a manifest whose import fails takes nothing else down and a name that
two distributions claim never reaches stevedore's conflict handling.

An import may raise anything: it becomes a verdict. Only KeyboardInterrupt, the user's, goes through.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from m3hal.dispatch.check import problem_of
from m3hal.dispatch.errors import M3halError
from m3hal.dispatch.manifest import Manifest
from m3hal.dispatch.names import RESERVED, normalized
from m3hal.dispatch.vendor import Failure, attempt
from m3hal.dispatch.verdict import Stage, Verdict

GROUP = "m3hal.backends"
#: The distribution of manifests that :func:`register` was given.
IN_PROCESS = "in-process"
REFERENCE = "reference"


@dataclass(frozen=True)
class Found:
    """A backend that is installed or registered.

    target: what the entry point names. manifest: None until it was imported, or when that failed. verdict: the last
    stage reached. traceback: of a failed import, for ``m3hal doctor``.
    """

    name: str
    distribution: str
    version: str
    target: str
    manifest: Manifest | None = None
    verdict: Verdict | None = None
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.distribution}:{self.name}"

    def rejected(self, stage: Stage, reason: str, trace: str = "") -> Found:
        """The same backend, out of the running."""
        verdict = Verdict(stage, False, reason, self.name, self.distribution)
        return replace(self, verdict=verdict, traceback=trace)

    @property
    def is_usable(self) -> bool:
        """Whether nothing has rejected it yet."""
        return self.verdict is None or self.verdict.accepted


_registered: dict[str, Found] = {}


def register(manifest: Manifest) -> None:
    """Adds a backend to this process, for tests and notebooks; a second call with its name replaces the first.

    Its distribution is ``in-process``. Raises M3halError for what is no usable manifest.
    """
    problem = problem_of(manifest) or _problem_with_name(getattr(manifest, "name", ""), IN_PROCESS)
    if problem:
        raise M3halError(f"the manifest can't be registered: {problem}.")
    _registered[manifest.name] = Found(manifest.name, IN_PROCESS, "", "m3hal.register", manifest)


def unregister(name: str) -> None:
    """Takes back :func:`register`; a name that is not registered is ignored."""
    _registered.pop(name, None)


def refresh() -> None:
    """Forgets the scan and the loaded manifests, after packages were installed into a running process."""
    importlib.invalidate_caches()
    _entries.cache_clear()
    _load.cache_clear()


def discover(refusal: Callable[[str, str], str | None] = lambda name, distribution: None) -> tuple[Found, ...]:
    """Every backend, in the order of its name; those that ``refusal(name, distribution)`` refuses are not imported."""
    everything = sorted([*_installed(), *_registered.values()], key=lambda found: (found.name, found.distribution))
    wanted = []
    for found in everything:
        reason = refusal(found.name, found.distribution)
        problem = _problem_with_name(found.name, found.distribution)
        if problem:
            wanted.append(found.rejected("discover", problem))
        else:
            wanted.append(found.rejected("policy", reason) if reason else found)
    return tuple(
        _load(found) if found.is_usable and found.manifest is None else found for found in _without_duplicates(wanted)
    )


def _without_duplicates(backends: Iterable[Found]) -> list[Found]:
    """A name claimed twice is nobody's, unless the policy has already left only one of the claims."""
    backends = list(backends)
    result = []
    for found in backends:
        rivals = [other for other in backends if other.name == found.name and other.is_usable]
        if found.is_usable and len(rivals) > 1:
            claims = " and ".join(f"{rival.distribution} {rival.version}".strip() for rival in rivals)
            reason = f"the name is claimed by {claims}; name one of them, e.g. '{rivals[0]}', or uninstall the other"
            found = found.rejected("discover", reason)
        result.append(found)
    return result


def _problem_with_name(name: str, distribution: str) -> str | None:
    if name in RESERVED:
        return f"{name!r} is a word of m3hal's configuration and can't be a backend's name"
    if name == REFERENCE and normalized(distribution) != "m3hal":
        return f"{REFERENCE!r} is m3hal's own backend; {distribution} must choose another name"
    return None


@cache
def _entries() -> tuple[importlib.metadata.EntryPoint, ...]:
    """The entry points of this environment, read once per process (15 to 40 ms); nothing is imported."""
    try:
        return tuple(importlib.metadata.entry_points(group=GROUP))
    except Exception:
        # One unreadable entry_points.txt, of whatever package, breaks the call above for everybody.
        return tuple(_readable_entries())


def _readable_entries() -> Iterator[importlib.metadata.EntryPoint]:
    """Distribution by distribution, ten times slower; the first of a name on sys.path counts."""
    seen = set()
    for distribution in importlib.metadata.distributions():
        name = normalized(distribution.metadata["Name"] or "")
        if name and name not in seen:
            seen.add(name)
            with contextlib.suppress(Exception):
                yield from [entry for entry in distribution.entry_points if entry.group == GROUP]


def _installed() -> list[Found]:
    return [
        Found(entry.name, entry.dist.name if entry.dist else "", entry.dist.version if entry.dist else "", entry.value)
        for entry in _entries()
    ]


@cache
def _load(found: Found) -> Found:
    """Imports one installed manifest, once per process, and looks whether it is one."""
    manifest = attempt(_import, found)
    if isinstance(manifest, Failure):
        return found.rejected("import", f"importing {found.target} {manifest.reason}", manifest.traceback)
    problem = problem_of(manifest)
    if problem is None and manifest.name != found.name:
        problem = f"the entry point is called {found.name!r} but its manifest {manifest.name!r}"
    return found.rejected("manifest", problem) if problem else replace(found, manifest=manifest)


def _import(found: Found) -> Any:
    # Here, because stevedore costs about 30 ms and `import m3hal.dispatch` is on every path.
    from stevedore.named import NamedExtensionManager

    class OneEntryPoint(NamedExtensionManager):  # type: ignore[type-arg]
        def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
            return [entry for entry in _entries() if entry.name == found.name and _is_from(entry, found.distribution)]

    manager = OneEntryPoint(GROUP, names=[found.name], on_load_failure_callback=_reraise)
    return manager.extensions[0].plugin


def _is_from(entry: importlib.metadata.EntryPoint, distribution: str) -> bool:
    return entry.dist is not None and entry.dist.name == distribution


def _reraise(manager: object, entry: object, error: BaseException) -> None:
    """stevedore would log and carry on; the caller keeps the reason and the traceback."""
    raise error
