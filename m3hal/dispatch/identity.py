"""The hash that names an implementation, computed from its files without importing them.

``impl_id`` covers the files, limits, traits and other declarations of one implementation, so a claim about it dies with
the first byte that changes. The plan's own fingerprint is :attr:`m3hal.dispatch.plans.Plan.fingerprint`.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from m3hal.dispatch.manifest import Impl

_SUFFIXES = tuple(importlib.machinery.all_suffixes())


class MissingFileError(Exception):
    """A path in a manifest leads to no file."""


def impl_id(operator: str, impl: Impl, seen: dict[tuple[str, str], str] | None = None) -> str:
    """16 hexadecimal digits. Raises MissingFileError, with the end of a sentence, when a named file isn't there.

    seen: hashes that implementations of one backend share, filled here; to be dropped when files may have changed.
    """
    seen = {} if seen is None else seen
    modules = {path.partition(":")[0] for path in (impl.path, impl.predicate) if path}
    package = impl.path.partition(":")[0].partition(".")[0]
    for module in sorted(modules):
        if (module, "") not in seen:
            seen[module, ""] = module_hash(module)
    for pattern in impl.files:
        if (package, pattern) not in seen:
            seen[package, pattern] = _files_hash(package, pattern)
    content = {module: seen[module, ""] for module in sorted(modules)}
    content |= {pattern: seen[package, pattern] for pattern in impl.files}
    return digest({"operator": operator, "declared": _plain(impl), "content": content})


def digest(data: Any) -> str:
    """A short hash of plain data."""
    text = json.dumps(data, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(impl: Impl) -> dict[str, Any]:
    """What it declares. What came later counts only where it says something, so that older claims stay true."""
    later = {name: repr(value) for name in ("devices", "calls") if (value := getattr(impl, name))}
    return {
        **{name: value for name, value in vars(impl).items() if name not in ("devices", "calls")},
        "traits": dict(impl.traits),
        "buckets": dict(impl.buckets),
        "limits": repr(impl.limits),
        "rungs": repr(impl.rungs),
        **later,
    }


def module_hash(module: str) -> str:
    """Of a module's file, without importing it. Raises MissingFileError when there is none."""
    path = module_file(module)
    if path is not None:
        return _content_hash(path)
    name = module.partition(".")[0]
    if roots(name):
        raise MissingFileError(f"the package {name} has no module {module}")
    loaded = sys.modules.get(module)
    if loaded is None:
        raise MissingFileError(f"there is no module {module}")
    # Typed into a notebook: it has no file, and no claim can cover it.
    return f"in-process {id(loaded)}"


def module_file(module: str) -> Path | None:
    """Where a module's code lies, found without importing it or its parents."""
    name, _, rest = module.partition(".")
    return next((path for root in roots(name) for path in _spellings(root, rest) if path.is_file()), None)


def _files_hash(package: str, pattern: str) -> str:
    """Over all files of a package that match a pattern relative to its folder."""
    try:
        found = [(root, path) for root in roots(package) if root.is_dir() for path in root.glob(pattern)]
    except (ValueError, NotImplementedError) as error:
        raise MissingFileError(f"its files {pattern!r} is no pattern inside the package {package}: {error}") from error
    named = sorted((path.relative_to(root).as_posix(), path) for root, path in found if path.is_file())
    if not named:
        raise MissingFileError(f"the package {package} has no file {pattern}")
    return digest([(name, _content_hash(path)) for name, path in named])


def roots(name: str) -> tuple[Path, ...]:
    """Where a top-level package lies; finding it does not import it."""
    loaded = sys.modules.get(name)
    try:
        # find_spec raises for a loaded module without a spec, as __main__ is in a notebook.
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        return ()
    if spec.submodule_search_locations:
        return tuple(map(Path, spec.submodule_search_locations))
    return (Path(spec.origin),) if spec.origin else ()


def _spellings(root: Path, rest: str) -> Iterator[Path]:
    """The files that may hold a module: the package itself, a submodule, a subpackage."""
    if not root.is_dir():
        if not rest:
            yield root
        return
    stem = root.joinpath(*rest.split(".")) if rest else root
    if rest:
        yield from (stem.with_name(stem.name + suffix) for suffix in _SUFFIXES)
    yield from (stem / f"__init__{suffix}" for suffix in _SUFFIXES)


def _content_hash(path: Path) -> str:
    status = path.stat()
    return _hash_at(path, status.st_mtime_ns, status.st_size)


@cache
def _hash_at(path: Path, modified: int, size: int) -> str:
    """A plan hashes the reference's files once per operator; a file that changed meanwhile is read again."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
