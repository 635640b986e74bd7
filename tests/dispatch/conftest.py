"""Toy backends: as real distributions in temporary environments, and, where that adds nothing, in this process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import m3hal
from m3hal import ops
from m3hal.dispatch import Impl, Manifest, discovery, register, unregister

CACHED = tuple(name for name in ops.NAMES if ops.load(name).group == "cache")
SHAPE = m3hal.ModelShape.from_config(
    m3hal.MINIMAX_M3, dtype="bfloat16", page_size=128, max_tokens=1024, max_seqs=16, max_context=4096
)

#: What every script in a toy environment starts with.
PRELUDE = """
import json, sys
import m3hal
from m3hal.dispatch import *
SHAPE = m3hal.ModelShape.from_config(
    m3hal.MINIMAX_M3, dtype="bfloat16", page_size=128, max_tokens=1024, max_seqs=16, max_context=4096)
def made(config=None, device="cpu", **keywords):
    return plan(SHAPE, device, Policy.resolve(config), **keywords)
def servers(p):
    return {row.operator: row.server for row in p.choices}
def refusal(*arguments, **keywords):
    try:
        made(*arguments, **keywords)
    except M3halError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]
def verdicts(p):
    return {str(found): [found.verdict.stage, found.verdict.reason] for found in p.backends}
"""


@dataclass
class Environment:
    """A folder on PYTHONPATH that holds installed distributions: package files beside their ``dist-info``."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def install(
        self,
        name: str = "acme",
        *,
        distribution: str = "",
        version: str = "1.0",
        package: str = "",
        operators: tuple[str, ...] = ops.CORE,
        impl: str = "",
        manifest: str = "",
        files: Mapping[str, str] | None = None,
    ) -> str:
        """Installs a backend whose kernels return their name; returns its package.

        impl: more arguments of every Impl. manifest: more arguments of the Manifest. files: package files that replace
        the generated ones.
        """
        distribution = distribution or f"m3hal-{name}"
        package = package or distribution.replace("-", "_")
        content = {
            "__init__.py": "",
            "manifest.py": manifest_source(name, package, operators, impl, manifest),
            "kernels.py": KERNELS,
        } | dict(files or {})
        for path, text in content.items():
            target = self.folder / package / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(textwrap.dedent(text))
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[m3hal.backends]\n{name} = {package}.manifest:MANIFEST\n")
        (info / "RECORD").write_text("".join(f"{package}/{path},,\n" for path in content))
        return package

    def run(self, script: str, **environ: str) -> Any:
        """Runs a script after PRELUDE in a new interpreter; returns the JSON that it prints last."""
        done = self.python("-c", PRELUDE + textwrap.dedent(script), **environ)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def python(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs Python here, without this process's own configuration of m3hal."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("M3HAL_")}
        path = os.pathsep.join(filter(None, [str(self.folder), clean.get("PYTHONPATH", "")]))
        return subprocess.run(
            [sys.executable, *arguments],
            env={**clean, "PYTHONPATH": path, **self.environ, **environ},
            capture_output=True,
            text=True,
            cwd=self.folder,
        )


#: Kernels that say who they are; a factory for any name.
KERNELS = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda site: lambda *inputs, out=None: f"{__package__}.{name}"
"""


def manifest_source(name: str, package: str, operators: tuple[str, ...], impl: str = "", manifest: str = "") -> str:
    """The text of a toy's manifest module."""
    return f"""
from m3hal.dispatch.manifest import Impl, Limit, Manifest, Rung, at_least, at_most, multiple_of, one_of

def impl(name):
    arguments = dict(layouts=("hnd", "nhd") if name in {CACHED!r} else (), memory="self")
    arguments.update(dict({impl}))
    return Impl("{package}.kernels:" + name, **arguments)

arguments = dict(
    name={name!r}, vendor="toy", api=">=1,<2", devices=("*",),
    operators={{name: (impl(name),) for name in {operators!r}}})
arguments.update(dict({manifest}))
MANIFEST = Manifest(**arguments)
"""


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment without toys."""
    return Environment(tmp_path)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees the reference only, whatever else is installed and configured."""
    entries = [entry for entry in discovery._entries() if entry.name == discovery.REFERENCE]
    monkeypatch.setattr(discovery, "_entries", lambda: tuple(entries))
    for name in [name for name in os.environ if name.startswith("M3HAL_")]:
        monkeypatch.delenv(name)


_counter = itertools.count()


@pytest.fixture
def toy(alone: None) -> Iterator[Callable[..., types.ModuleType]]:
    """Registers a backend in this process: ``toy("acme", rms_norm=factory, ...)`` or ``operators={...: (Impl, ...)}``.

    Factories become attributes of a module of their own, which is returned.
    """
    names, modules = [], []

    def make(name: str = "acme", operators: Mapping[str, Any] | None = None, **keywords: Any) -> types.ModuleType:
        module = types.ModuleType(f"toy_{name}_{next(_counter)}")
        factories = {key: keywords.pop(key) for key in list(keywords) if key in ops.NAMES}
        impls: dict[str, Any] = dict(operators or {})
        for operator, factory in factories.items():
            setattr(module, operator, factory)
            layouts = ("hnd", "nhd") if operator in CACHED else ()
            impls[operator] = (Impl(f"{module.__name__}:{operator}", layouts=layouts),)
        sys.modules[module.__name__] = module
        arguments = {"vendor": "toy", "api": ">=1,<2", "devices": ("*",), **keywords}
        register(Manifest(name=name, operators=impls, **arguments))
        names.append(name)
        modules.append(module.__name__)
        return module

    yield make
    for name in names:
        unregister(name)
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def shape() -> m3hal.ModelShape:
    """MiniMax-M3 as published, behind a small engine."""
    return SHAPE
