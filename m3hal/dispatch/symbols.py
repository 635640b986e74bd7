"""Compares functions of a vendor's library with what an adapter was written for, in the library's sources.

Nothing of the library is imported: that may need a driver, and may initialise the device in a process that forks
later. Decorators are ignored, as all that these libraries use keep the signature that is written.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from m3hal.dispatch.identity import module_file, roots
from m3hal.dispatch.manifest import Symbol

_Function = ast.FunctionDef | ast.AsyncFunctionDef
#: a longer chain of re-exports is a circle
_DEEPEST = 8


class _Absent(Exception):
    """What the sources lack, as a sentence."""


@dataclass(frozen=True)
class _Parameter:
    """One parameter as written: its name, its default's text (None: required), whether it can be passed by position
    and whether by name."""

    name: str
    default: str | None
    positional: bool
    named: bool

    def __str__(self) -> str:
        return self.name if self.default is None else f"{self.name}={self.default}"


def is_installed(symbol: Symbol) -> bool:
    """Whether there is a package of that name to look into."""
    return bool(roots(symbol.path.partition(".")[0].partition(":")[0]))


def difference(symbol: Symbol) -> str | None:
    """What the installed library does otherwise, as a sentence without its full stop; None when nothing."""
    try:
        found = _parameters(_function(symbol.path))
        problem = _of_parameters(_read(symbol.parameters), found)
        if problem:
            told = ", ".join(map(str, found))
            return f"{symbol.path} takes ({told}), not what it took on {symbol.date}: {problem}"
        for path, wanted in symbol.declares.items():
            says = ast.unparse(_resolve(path))
            if says != _normal(wanted):
                return f"{path} is {says}; on {symbol.date} it was {wanted}"
    except _Absent as problem:
        return str(problem)
    return None


def _of_parameters(wanted: list[_Parameter], found: list[_Parameter]) -> str | None:
    by_name = {parameter.name: parameter for parameter in found}
    gone = [f"{p.name!r} is gone" for p in wanted if p.name not in by_name]
    known = {parameter.name for parameter in wanted}
    asked = [f"{p.name!r} is new and required" for p in found if p.name not in known and p.default is None]
    changed = [
        f"{p.name!r} is required by now" if now is None else f"{p.name!r} is {now} unless given, not {p.default}"
        for p in wanted
        if p.name in by_name and p.default is not None and (now := by_name[p.name].default) != p.default
    ]
    nameless = [
        f"{p.name!r} can't be given by name any more"
        for p in wanted
        if p.named and p.name in by_name and not by_name[p.name].named
    ]
    if gone or asked or changed or nameless:
        return ", ".join([*gone, *asked, *changed, *nameless])
    order = [parameter.name for parameter in wanted if parameter.positional]
    if [parameter.name for parameter in found if parameter.positional][: len(order)] != order:
        return f"its positional parameters no longer begin with {', '.join(order)}"
    return None


def _read(parameters: tuple[str, ...]) -> list[_Parameter]:
    """Recorded parameters, which are written as Python writes them."""
    tree = ast.parse(f"def recorded({', '.join(parameters)}): ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    return _parameters(tree)


def _parameters(function: _Function) -> list[_Parameter]:
    """In their order; ``*args`` and ``**kwargs`` count as optional."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    nameless = len(given.posonlyargs)
    pairs = enumerate(zip(plain, defaults, strict=True))
    found = [_Parameter(p.arg, _text(d), True, i >= nameless) for i, (p, d) in pairs]
    if given.vararg:
        found.append(_Parameter(f"*{given.vararg.arg}", "()", True, False))
    by_name = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    found += [_Parameter(p.arg, _text(d), False, True) for p, d in by_name]
    return [*found, _Parameter(f"**{given.kwarg.arg}", "{}", False, False)] if given.kwarg else found


def _text(node: ast.expr | None) -> str | None:
    return None if node is None else ast.unparse(node)


def _normal(text: str) -> str:
    """An expression as ``ast.unparse`` spells it."""
    return ast.unparse(ast.parse(text, mode="eval"))


def _function(path: str) -> _Function:
    node = _resolve(path)
    if not isinstance(node, _Function):
        raise _Absent(f"{path} is no function that is written in Python any more")
    if isinstance(node, ast.AsyncFunctionDef):
        raise _Absent(f"{path} is a coroutine by now")
    return node


def _resolve(path: str) -> ast.AST:
    """The node that a dotted path leads to. Raises _Absent."""
    module, _, inside = path.partition(":")
    name, *rest = inside.split(".")
    node = _named(module, name, 0)
    for step in rest:
        below = _step(node, step)
        if below is None:
            raise _Absent(f"{path} is not there any more: {name} has no {step}")
        node, name = below, f"{name}.{step}"
    return node


def _step(node: ast.AST, name: str) -> ast.AST | None:
    if isinstance(node, ast.ClassDef):
        return _one(node.body, name, node.name)
    if isinstance(node, ast.Call):
        if name.isdigit():
            return node.args[int(name)] if int(name) < len(node.args) else None
        return next((keyword.value for keyword in node.keywords if keyword.arg == name), None)
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        return node.values[keys.index(name)] if name in keys else None
    return None


def _named(module: str, name: str, depth: int) -> ast.AST:
    """A top-level definition, through re-exports. Raises _Absent."""
    tree, path = _tree(module)
    statements = list(_statements(tree.body))
    node = _one(tree.body, name, module)
    if node is not None:
        if isinstance(node, ast.Name) and node.id != name and depth < _DEEPEST:  # an alias: old = new
            return _named(module, node.id, depth + 1)
        return node
    for statement in statements:
        if isinstance(statement, ast.ImportFrom) and depth < _DEEPEST:
            for alias in statement.names:
                if name == (alias.asname or alias.name):
                    return _named(_absolute(statement, module, path), alias.name, depth + 1)
    raise _Absent(f"{module} has no {name} any more")


def _one(body: list[ast.stmt], name: str, inside: str) -> ast.AST | None:
    """What a body binds ``name`` to at its end; None: nothing. Raises _Absent where that depends on a condition."""
    find, found = _bound(name), list[ast.AST]()
    for statement in body:
        here = [node for node in map(find, _statements([statement])) if node is not None]
        found = [*(() if find(statement) else found), *here]  # what is bound in any case hides what was before
    spellings = {_spelt(node) for node in found}
    if len(spellings) > 1:
        raise _Absent(f"{inside} defines {name} in {len(spellings)} ways, and which one holds can't be told")
    return found[-1] if found else None


def _spelt(node: ast.AST) -> str:
    """What two definitions must share to be one to a caller."""
    if isinstance(node, _Function):
        return f"{type(node).__name__}({', '.join(f'{p} {p.positional} {p.named}' for p in _parameters(node))})"
    return ast.dump(node)


def _bound(name: str) -> Callable[[ast.stmt], ast.AST | None]:
    """Takes a statement to what it binds ``name`` to, or None."""

    def find(statement: ast.stmt) -> ast.AST | None:
        if isinstance(statement, _Function | ast.ClassDef):
            return statement if statement.name == name else None
        if isinstance(statement, ast.Assign):
            return statement.value if any(isinstance(t, ast.Name) and t.id == name for t in statement.targets) else None
        if isinstance(statement, ast.AnnAssign):
            return statement.value if isinstance(statement.target, ast.Name) and statement.target.id == name else None
        return None

    return find


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those under ``if``, ``try`` and ``with`` included; not what handles an error."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(statement, part, []))


def _absolute(statement: ast.ImportFrom, module: str, path: Path) -> str:
    """The module that ``from .x import y`` names."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    up = statement.level - (1 if path.name == "__init__.py" else 0)
    parts = parts[: len(parts) - up]
    return ".".join([*parts, statement.module] if statement.module else parts)


def _tree(module: str) -> tuple[ast.Module, Path]:
    path = module_file(module)
    if path is None:
        raise _Absent(f"there is no module {module} any more")
    if path.suffix != ".py":
        raise _Absent(f"{module} is installed without its source, so that what it takes can't be compared")
    try:
        status = path.stat()
        return _parsed(path, status.st_mtime_ns, status.st_size), path
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        raise _Absent(f"{path} can't be read as Python source: {error}") from error


@cache
def _parsed(path: Path, modified: int, size: int) -> ast.Module:
    """A plan asks once per site; a file that changed meanwhile is read again."""
    return ast.parse(path.read_bytes())
