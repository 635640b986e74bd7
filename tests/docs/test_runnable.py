"""The manual's examples run. A block after `<!-- runnable -->` must succeed, one after `<!-- fails -->` must end with
exit code 1; both print what a block after `<!-- prints -->` shows (`...` stands for anything).

Shell blocks run in an empty folder. A page that has files (`<!-- file: path -->`) is a tutorial, with an environment to
install into."""

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
BLOCK = re.compile(r"^<!-- (file: \S+|runnable|fails|prints) -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    mark: str
    language: str
    code: str
    prints: str = ""


def blocks(text: str) -> list[Block]:
    """The runnable blocks of a page, each with the output that is shown for it."""
    found: list[Block] = []
    for mark, language, body in BLOCK.findall(text):
        if mark == "prints":
            found[-1].prints = body
        else:
            found.append(Block(mark, language, body))
    return found


RUNNABLE = [page for page in PAGES if blocks(page.read_text())]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Every block of a page, in order; its Python blocks share one namespace, as they do for a reader."""
    steps, namespace = blocks(page.read_text()), dict[str, Any]()
    is_tutorial = any(block.mark.startswith("file: ") for block in steps)
    workplace = request.getfixturevalue("workplace") if is_tutorial else None
    for block in steps:
        if block.mark.startswith("file: "):
            (workplace.folder / block.mark.removeprefix("file: ")).write_text(block.code)
            continue
        if block.language == "python":
            output = run_python(block.code, namespace)
        else:
            code, output = workplace.shell(block.code) if workplace else run_shell(block.code, tmp_path)
            assert code == (1 if block.mark == "fails" else 0), f"{block.code}\n{output}"
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


def run_shell(code: str, folder: Path) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("M3HAL_")} | {"PATH": path}
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def first_missing(promised: str, printed: str) -> str | None:
    """The first promised line that does not follow, in order, in what was printed; space at the edges is ignored."""
    lines = iter([line.strip() for line in printed.splitlines()])
    for line in filter(None, map(str.strip, promised.splitlines())):
        pattern = re.sub(r"([\[\]?*])", r"[\1]", line).replace("...", "*")
        if not any(fnmatch.fnmatchcase(candidate, pattern) for candidate in lines):
            return line
    return None
