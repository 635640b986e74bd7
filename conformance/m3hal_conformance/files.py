"""Which modules of its package an implementation consists of, read from the sources without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from m3hal.dispatch import Impl
from m3hal.dispatch.identity import module_file, roots


def unlisted_modules(impl: Impl) -> tuple[str, ...]:
    """Modules of the factory's package that it imports, itself or through others, and that ``files`` leaves out.

    The packages' own ``__init__`` count only where code imports from them. What is imported by a name that is computed
    is not seen.
    """
    first = impl.path.partition(":")[0]
    package = first.partition(".")[0]
    listed = {path.resolve() for root in roots(package) for pattern in impl.files for path in root.glob(pattern)}
    return tuple(
        module
        for module in sorted(_reached(first))
        if module != first and (path := module_file(module)) is not None and path.resolve() not in listed
    )


@cache
def _reached(first: str) -> frozenset[str]:
    """The modules of one package that a module leads to, itself included."""
    found, ahead = {first}, [first]
    while ahead:
        for name in _imports(ahead.pop()):
            if name not in found:
                found.add(name)
                ahead.append(name)
    return frozenset(found)


def _imports(module: str) -> Iterator[str]:
    """The modules of its own package that a module names in import statements, anywhere in it."""
    package = module.partition(".")[0]
    path = module_file(module)
    if path is None or path.suffix != ".py":
        return
    inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            names: list[tuple[str, tuple[str, ...]]] = [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(_absolute(node, inside), tuple(alias.name for alias in node.names))]
        else:
            continue
        for base, members in names:
            if base.partition(".")[0] == package:
                yield from _modules_of(base, members)


def _modules_of(base: str, members: tuple[str, ...]) -> Iterator[str]:
    """``from base import members``: the members that are modules, and base itself where one is not."""
    modules = [f"{base}.{member}" for member in members if module_file(f"{base}.{member}") is not None]
    yield from modules
    if len(modules) < len(members) or not members:
        yield base


def _absolute(node: ast.ImportFrom, inside: str) -> str:
    if not node.level:
        return node.module or ""
    parents = inside.split(".")[: len(inside.split(".")) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])
