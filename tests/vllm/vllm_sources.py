"""vLLM's Python sources, installed or in a wheel, read without importing them."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Sources:
    """root: a folder that holds ``vllm``, or a wheel."""

    root: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)

    @cached_property
    def _wheel(self) -> zipfile.ZipFile | None:
        return zipfile.ZipFile(self.root) if self.root.is_file() else None

    def tree(self, module: str) -> ast.Module | None:
        """None when there is no such module."""
        if module not in self._trees:
            path = module.replace(".", "/")
            texts = (self._text(f"{path}{tail}") for tail in (".py", "/__init__.py"))
            found = next((text for text in texts if text is not None), None)
            self._trees[module] = None if found is None else ast.parse(found)
        return self._trees[module]

    def _text(self, path: str) -> str | None:
        if self._wheel is not None:
            return self._wheel.read(path).decode() if path in self._wheel.NameToInfo else None
        file = self.root / path
        return file.read_text() if file.is_file() else None

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Where a module gets a name from: the module that defines it and the node; follows imports inside vLLM."""
        tree = self.tree(module)
        for node in flat(tree.body) if tree else ():
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in assigned(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                source = absolute(module, node, self._is_package(module))
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        wanted = name if alias.name == "*" else alias.name
                        found = self.find(source, wanted) if source.startswith("vllm") else (source, node)
                        if found:
                            return found
        if self.tree(f"{module}.{name}") is not None:
            return module, ast.Pass()
        return self._lazy(module, name)

    def _lazy(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """``vllm/__init__.py`` maps names to ``".module:name"``."""
        for node in ast.walk(self.tree(module) or ast.Module([], [])):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                        source, _, target = str(value.value).partition(":")
                        return self.find(module + source, target)
        return None

    def _is_package(self, module: str) -> bool:
        return self._text(f"{module.replace('.', '/')}/__init__.py") is not None

    def lineage(self, module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases, as far as they are vLLM's."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return
        where, node = found
        yield where, node
        for base in node.bases:
            target = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(target, ast.Name):
                yield from self.lineage(where, target.id)

    def function(self, module: str, path: str) -> Function | None:
        """A function by its name, or a method, also an inherited one, by ``Class.method``."""
        owner, _, name = path.rpartition(".")
        if not owner:
            found = self.find(module, name)
            return found[1] if found and isinstance(found[1], Function) else None
        methods = (
            node
            for _, cls in self.lineage(module, owner)
            for node in cls.body
            if isinstance(node, Function) and node.name == name
        )
        return next(methods, None)

    def attributes(self, module: str, name: str) -> set[str]:
        """Fields, methods and what methods assign to ``self``, of a class and its bases."""
        found: set[str] = set()
        for _, cls in self.lineage(module, name):
            for node in ast.walk(cls):
                if isinstance(node, Function):
                    found.add(node.name)
                elif isinstance(node, ast.Assign | ast.AnnAssign):
                    found |= assigned(node)
        return found


def overlay(wheel: Path, installed: Path, target: Path) -> Path:
    """The Python of a wheel over the compiled modules of an installed vLLM for CPUs; ``target`` goes on PYTHONPATH.

    Not an official build: the compiled modules are another version's.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(target, names)
    for compiled in installed.rglob("*.so"):
        place = target / "vllm" / compiled.relative_to(installed)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(compiled)
    (info,) = target.glob("vllm-*.dist-info")
    metadata = info / "METADATA"  # vLLM tells a CPU build by its version
    version = info.name.removeprefix("vllm-").removesuffix(".dist-info")
    metadata.write_text(metadata.read_text().replace(f"Version: {version}", f"Version: {version}+cpu", 1))
    return target


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, with those under if, try and with."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from flat(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from flat(handler.body)


def assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """Names, and attributes of ``self``, that a statement gives a value."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    inner = [item for target in targets for item in getattr(target, "elts", [target])]
    names = {item.id for item in inner if isinstance(item, ast.Name)}
    return names | {item.attr for item in inner if isinstance(item, ast.Attribute)}


def absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    """The module that ``from`` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def parameters(function: Function) -> tuple[list[str], set[str]]:
    """Names in order, without self and cls, and those that a caller must give."""
    args = function.args
    positional = [a.arg for a in (*args.posonlyargs, *args.args)]
    required = set(positional[: len(positional) - len(args.defaults)])
    required |= {a.arg for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is None}
    names = [*positional, *(a.arg for a in args.kwonlyargs)]
    own = {"self", "cls"}
    return [name for name in names if name not in own], required - own
