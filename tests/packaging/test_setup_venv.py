"""scripts/setup_venv.py says what is missing, and finds the index of CPU builds only where it answers."""

from __future__ import annotations

import http.server
import importlib.util
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from .conftest import PROJECTS, ROOT


@pytest.fixture
def setup_venv() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "scripts" / "setup_venv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def index() -> Iterator[str]:
    """A web server on this machine that answers every path."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
    server.shutdown()
    server.server_close()


def test_old_python_is_named(setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the version found, the package to install and how to name another Python."""
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit, match=r"3\.10.*make PYTHON=python3\.11.*apt install python3\.11"):
        setup_venv.check_python()


def test_missing_venv_module_is_named(setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian splits ensurepip off: the message names its package."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else find(name))
    with pytest.raises(SystemExit, match="apt install python3-venv"):
        setup_venv.check_python()


def test_index_is_used_where_it_answers(setup_venv: ModuleType, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that answers is passed to pip."""
    monkeypatch.setattr(setup_venv, "TORCH_CPU_INDEX", index)
    assert setup_venv.torch_index() == ("--extra-index-url", index)


def test_silent_index_is_left_out_soon(setup_venv: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that takes the connection and never answers costs seconds, not pip's minutes of retries."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(setup_venv, "TORCH_CPU_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}/whl/cpu")
        monkeypatch.setattr(setup_venv, "PATIENCE", 0.5)
        began = time.monotonic()
        assert setup_venv.torch_index() == ()
        assert time.monotonic() - began < 5


def test_every_distribution_is_installed(setup_venv: ModuleType) -> None:
    """What the wheelhouse publishes, and every backend of the tree, is in the development environment."""
    installed = {f"./{name}" for name in setup_venv.PROJECTS}
    assert installed >= set(PROJECTS) - {"."}
    assert {f"./{path.parent.relative_to(ROOT)}" for path in ROOT.glob("backends/*/pyproject.toml")} <= installed
