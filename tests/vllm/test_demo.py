"""`make demo`'s program, from the checkpoint to the stopped server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def test_demo_serves_and_agrees(python: Any, tmp_path: Path) -> None:
    """It streams a completion, shows the plan, finds every token equal, and leaves no process behind."""
    started = time.monotonic()
    done = python("-m", "m3hal.demo", "--directory", tmp_path, "--max-tokens", 32)
    assert time.monotonic() - started <= 120
    assert "32 of 32 tokens equal transformers'" in done.stdout
    for said in ("stock vLLM serves http://127.0.0.1:", "sparse_attention", "engine: vllm", "server stopped"):
        assert said in done.stdout
    assert processes_about(tmp_path) == []


def test_interrupted_demo_stops_its_server(tmp_path: Path) -> None:
    """Ctrl-C while the server starts: the demo ends with 1 within seconds, and so does everything it started."""
    command = [sys.executable, "-m", "m3hal.demo", "--directory", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while demo.poll() is None and not (tmp_path / "server.log").exists():
        time.sleep(0.1)
    time.sleep(2)
    assert processes_about(tmp_path) != []
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert processes_about(tmp_path) == []


def test_failure_shows_log_and_remedy(python: Any, tmp_path: Path) -> None:
    """Without the plugin vLLM can't serve the model here: the demo shows the end of the log and what to do."""
    done = python("-m", "m3hal.demo", "--directory", tmp_path, env={"VLLM_PLUGINS": "none"}, check=False)
    assert done.returncode == 1
    assert "vLLM's server ended with code 1" in done.stderr
    assert "Remedy: m3hal's plugin was not loaded; unset VLLM_PLUGINS" in done.stderr


def processes_about(directory: Path) -> list[str]:
    """Command lines of living processes that name a directory, except this one's."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(directory) in line and int(entry.name) != os.getpid():
            found.append(line)
    return found
