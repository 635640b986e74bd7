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

from m3hal import demo

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
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while running.poll() is None and not (tmp_path / "server.log").exists():
        time.sleep(0.1)
    time.sleep(2)
    assert processes_about(tmp_path) != []
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)
    assert running.returncode == 1
    assert processes_about(tmp_path) == []


def test_failure_shows_log_and_remedy(tmp_path: Path) -> None:
    """A server that ends: the demo's error is the end of its log, and what to do about it where that is known."""
    log = tmp_path / "server.log"
    log.write_text("first\n" * 99 + "Model architectures ['M3'] failed to be inspected.\n")
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    ended.wait()
    with pytest.raises(demo.DemoError) as caught:
        demo._await_server(ended, "http://127.0.0.1:9", log, demo.Clock())
    message = str(caught.value)
    assert "ended with code 3" in message
    assert 25 < message.count("first") < 35
    assert "Remedy: m3hal's plugin was not loaded; unset VLLM_PLUGINS" in message


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
