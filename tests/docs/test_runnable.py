"""The manual's examples run: a block after `<!-- runnable -->` must succeed, and print what a block after
`<!-- prints -->` shows (`...` stands for anything)."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")])
BLOCK = re.compile(r"^<!-- (runnable|prints) -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    language: str
    code: str
    prints: str = ""


def blocks(text: str) -> list[Block]:
    """The runnable blocks of a page, each with the output that is shown for it."""
    found: list[Block] = []
    for mark, language, body in BLOCK.findall(text):
        if mark == "runnable":
            found.append(Block(language, body))
        else:
            found[-1].prints = body
    return found


RUNNABLE = [page for page in PAGES if blocks(page.read_text())]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path) -> None:
    """Every runnable block of a page, in order; its Python blocks share one namespace, as they do for a reader."""
    namespace: dict[str, Any] = {}
    for block in blocks(page.read_text()):
        output = run_python(block.code, namespace) if block.language == "python" else run_shell(block.code)
        missing = first_missing(block.prints, output)
        assert missing is None, f"{page.name} promises {missing!r}; this was printed:\n{output}"


def test_the_manual_has_examples() -> None:
    """The marks are found: the README and the pages for users have blocks that run."""
    assert {page.name for page in RUNNABLE} >= {"README.md", "quickstart.md", "dispatch.md", "adding-a-backend.md"}


def test_a_wrong_promise_is_noticed() -> None:
    """The check can fail: lines out of order, or never printed, are reported."""
    assert first_missing("a\n...c\n", "a\nb c\n") is None
    assert first_missing("b\na\n", "a\nb\n") == "a"
    assert first_missing("never", "a\nb\n") == "never"


def run_python(code: str, namespace: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "example", "exec"), namespace)
    return output.getvalue()


def run_shell(code: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("M3HAL_")} | {"PATH": path}
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"{code}\n{done.stdout}"
    return done.stdout


def first_missing(promised: str, printed: str) -> str | None:
    """The first promised line that does not follow, in order, in what was printed; space at the edges is ignored."""
    lines = iter([line.strip() for line in printed.splitlines()])
    for line in filter(None, map(str.strip, promised.splitlines())):
        pattern = re.sub(r"([\[\]?*])", r"[\1]", line).replace("...", "*")
        if not any(fnmatch.fnmatchcase(candidate, pattern) for candidate in lines):
            return line
    return None
