"""Looks for what is wrong with an installation: versions, devices, configuration, plugins that fail, with tracebacks.

    m3hal doctor --bundle report.zip --plan plan.json

also writes one archive for a bug report: all of the above, the configuration with where each value came from, the
variables that are ours, the claims without their cases, the names of recorded calls, and a plan if one is named. Tokens
and the home folder are taken out; what it holds is listed. Exits with 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3hal import __version__, ops
from m3hal.cli import _bundle
from m3hal.cli.output import emit
from m3hal.dispatch import devices
from m3hal.dispatch.discovery import GROUP, Found, discover
from m3hal.dispatch.errors import ConfigurationError, M3halError
from m3hal.dispatch.identity import MissingFileError, module_hash
from m3hal.dispatch.libraries import Library, libraries, software
from m3hal.dispatch.manifest import API_VERSION
from m3hal.dispatch.names import normalized
from m3hal.dispatch.policy import Policy
from m3hal.dispatch.screen import candidates, screen_backend

HELP = "what is wrong with this installation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The archive."""
    parser.add_argument("--bundle", metavar="FILE", help="also write a zip archive for a bug report")
    parser.add_argument("--plan", metavar="FILE", help="an exported plan, to put into the archive")


def run(arguments: argparse.Namespace) -> int:
    """Passes when nothing is wrong."""
    backends = [_judged(found) for found in discover()]
    problems = [*_configuration_problems(), *_distribution_problems(), *_backend_problems(backends)]
    data = {
        "versions": _versions(),
        "devices": [device.to_json() for device in devices.detect()],
        "backends": [
            {
                "name": found.name,
                "distribution": found.distribution,
                "version": found.version,
                "libraries": [library.to_json() for library in libraries(found.manifest)],
                "verdict": found.verdict.to_json() if found.verdict else None,
                "traceback": found.traceback,
            }
            for found in backends
        ],
        "problems": problems,
    }
    told = _bundled(arguments, data, backends)
    emit(arguments, {**data, **told}, "\n\n".join([_page(data), *_listing(told)]))
    return 1 if problems else 0


def _bundled(arguments: argparse.Namespace, data: dict[str, Any], backends: list[Found]) -> dict[str, Any]:
    """Writes the archive if one is asked for, and says what it holds."""
    if arguments.bundle is None:
        if arguments.plan is not None:
            raise ConfigurationError("--plan puts a plan into an archive; name that with --bundle FILE.")
        return {}
    contents: dict[str, Any] = {
        "doctor": data,
        "policy": _bundle.policy(devices.detect()[0].device, os.environ),
        "environment": _bundle.variables(os.environ),
        "claims": _bundle.claims(backends),
        "captures": _bundle.captures(os.environ),
    }
    if arguments.plan is not None:
        contents["plan"] = _bundle.plan(arguments.plan)
    members = _bundle.write(arguments.bundle, contents, _bundle.home())
    size = Path(arguments.bundle).stat().st_size
    return {"bundle": {"path": arguments.bundle, "bytes": size, "files": dict(members)}}


def _listing(told: dict[str, Any]) -> list[str]:
    if not told:
        return []
    bundle = told["bundle"]
    lines = [f"wrote {bundle['path']}, {bundle['bytes']} bytes; tokens and the home folder are taken out. It holds"]
    return ["\n".join([*lines, *(f"  {name:<18} {size} bytes" for name, size in bundle["files"].items())])]


def _judged(found: Found) -> Found:
    """For the first of this machine's devices that the backend is for; else for none."""
    results = [screen_backend(found, device.device, present=True) for device in devices.detect()]
    return next((r for r in results if not (r.verdict and r.verdict.stage == "device")), results[0])


def _versions() -> dict[str, str]:
    api = {"backend API": ".".join(map(str, API_VERSION))}
    return {"m3hal": __version__, **api, **software(), "executable": sys.executable}


def _configuration_problems() -> Iterator[str]:
    try:
        Policy.resolve()
    except M3halError as error:
        yield f"configuration: {error}"


def _backend_problems(backends: list[Found]) -> Iterator[str]:
    """A backend for another device is not ill; one that fails to import, lies, or crashes its probe is."""
    operators = {name: ops.load(name) for name in ops.NAMES}
    for found in backends:
        if found.is_usable:
            _, bad = candidates(found, operators, {})
            yield from (f"{found}, operator {verdict.operator}: {verdict.reason}" for verdict in bad)
        elif found.verdict and (found.traceback or found.verdict.stage in ("discover", "manifest", "api", "library")):
            yield f"{found}: rejected at {found.verdict.stage}: {found.verdict.reason}"


def _distribution_problems() -> Iterator[str]:
    """Installations that hide one another, and entry points that outlived their package."""
    places: dict[str, list[importlib.metadata.Distribution]] = {}
    for distribution in importlib.metadata.distributions():
        name = normalized(distribution.metadata["Name"] or "")
        try:
            concerned = any(entry.group == GROUP for entry in distribution.entry_points)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            yield f"{name} in {distribution.locate_file('')} has an unreadable entry_points.txt ({told}); reinstall it"
            continue
        if name.startswith("m3hal") or concerned:
            places.setdefault(name, []).append(distribution)
    for name, (first, *hidden) in places.items():
        for other in hidden:
            here, there = first.locate_file(""), other.locate_file("")
            yield f"{name} {first.version} in {here} hides {other.version} in {there}; pip uninstall the one not meant"
        yield from _stale_entries(name, first)


def _stale_entries(name: str, distribution: importlib.metadata.Distribution) -> Iterator[str]:
    for entry in distribution.entry_points:
        try:
            if entry.group == GROUP:
                module_hash(entry.module)
        except MissingFileError as error:
            yield f"{name} {distribution.version} is stale: its entry point {entry.name} is {entry.value}, but {error}"


def _page(data: dict[str, Any]) -> str:
    parts = ["versions\n" + "\n".join(f"  {name:<12} {version}" for name, version in data["versions"].items())]
    parts.append("devices\n" + "\n".join(f"  {d['device']:<12} {d['label']}" for d in data["devices"]))
    lines = []
    for backend in data["backends"]:
        verdict = backend["verdict"]
        state = "usable" if verdict["accepted"] else f"rejected at {verdict['stage']}"
        lines.append(
            f"  {backend['name']:<12} {backend['distribution']} {backend['version']}: {state}: {verdict['reason']}"
        )
        if backend["libraries"]:
            lines.append(f"      calls {', '.join(str(Library(**library)) for library in backend['libraries'])}")
        lines += [f"      {line}" for line in backend["traceback"].splitlines()]
    parts.append("backends\n" + "\n".join(lines))
    parts.append("problems\n" + ("\n".join(f"  {problem}" for problem in data["problems"]) or "  none"))
    return "\n\n".join(parts)
