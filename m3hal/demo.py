"""`make demo`: a tiny MiniMax-M3, served by stock vLLM on this CPU through m3hal, compared with transformers.

    python -m m3hal.demo [--max-tokens 48] [--directory DIR]

Writes a checkpoint, starts vLLM's own OpenAI server with ``--additional-config '{"m3hal": {"backend": "reference"}}'``,
streams a completion from it, shows the plan, and compares every token with what transformers decodes from the same
files. Stops the server whatever happens. Exits with 0 when all tokens are equal, else with 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m3hal.checkpoint import tiny

POLICY = {"backend": "reference"}
DTYPE = "float32"  # the dtype in which two engines can be compared token by token
MAX_CONTEXT = 2048
MAX_SEQS = 4
START_TIMEOUT = 600  # seconds; a server that ended is noticed at once
REMEDIES = {
    "failed to be inspected": "m3hal's plugin was not loaded; unset VLLM_PLUGINS, or name m3hal in it.",
    "No module named 'vllm'": "vLLM is not installed here; run `make setup`, or see docs/serving.md.",
    "torchvision::nms": "torchvision does not fit this PyTorch; `pip uninstall torchvision torchaudio torchcodec`.",
    "libtorch_cuda": "a CUDA build of PyTorch or vLLM is installed; run `make clean setup`.",
    "less than desired CPU memory": "not enough free memory; close something and run again.",
}


class DemoError(Exception):
    """What went wrong, as a sentence."""


class Clock:
    """Prints lines with the seconds since the demo began, and a running count while something takes long."""

    def __init__(self) -> None:
        self._start, self._shown = time.monotonic(), 0.0

    def __call__(self, text: str) -> None:
        print(f"[{self._now():5.1f} s] {text}", flush=True)

    def waiting(self, text: str) -> None:
        """Says every five seconds that the demo is still alive."""
        if self._now() - self._shown >= 5:
            self._shown = self._now()
            self(text)

    def _now(self) -> float:
        return time.monotonic() - self._start


def main(argv: list[str] | None = None) -> int:
    """``python -m m3hal.demo``."""
    parser = argparse.ArgumentParser(prog="python -m m3hal.demo", description="Serve a tiny MiniMax-M3 on this CPU.")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--directory", type=Path, help="keep checkpoint and logs here (default: a temporary folder)")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a terminated demo stops and tidies like Ctrl-C
    work = args.directory or Path(tempfile.mkdtemp(prefix="m3hal-demo-"))
    try:
        equal = run(work, args.max_tokens, Clock())
    except DemoError as error:
        print(f"\nThe demo failed: {error}\nIts files are in {work}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        equal = False
    if args.directory is None:
        shutil.rmtree(work)
    return 0 if equal else 1


def run(work: Path, max_tokens: int, say: Clock) -> bool:
    """The whole demo in a folder; whether vLLM's tokens equal transformers'."""
    checkpoint = tiny.write(work / "tiny-minimax-m3", dtype=DTYPE)
    say(f"wrote a tiny MiniMax-M3 into {checkpoint} (random weights, published tensor names)")
    prompt = _encode(checkpoint, 2 * tiny.SAMPLE_TEXT)
    with _oracle(work, checkpoint, prompt, max_tokens) as oracle, _server(work, checkpoint) as (server, url):
        say(f"transformers decodes {max_tokens} tokens in the background; vLLM's OpenAI server starts on the CPU")
        _await_server(server, url, work / "server.log", say)
        say(
            f"stock vLLM serves {url}; it continues a prompt of {len(prompt)} tokens, of which MSA reads 256 at a time"
            " (random weights, so the text means nothing):"
        )
        tokens, pace = _stream(url, str(checkpoint), prompt, max_tokens)
        say(f"{len(tokens)} tokens, a median of {1000 * pace:.0f} ms apart")
        _show_plan(work / "server.log", say)
        expected = _await_oracle(oracle, work, say)
        equal = sum(ours == theirs for ours, theirs in zip(tokens, expected, strict=False))
        say(f"{equal} of {max_tokens} tokens equal transformers' on the same weights")
        print(f"          vLLM          {tokens}\n          transformers  {expected}")
    say("server stopped")
    return tokens == expected


@contextmanager
def _server(work: Path, checkpoint: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Stock vLLM's OpenAI server as a process group of its own; the group is gone when this ends."""
    port = _free_port()
    command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--dtype", DTYPE, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(MAX_CONTEXT), "--max-num-seqs", str(MAX_SEQS)]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--additional-config", json.dumps({"m3hal": POLICY})]
    with (work / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=_environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        _stop(process)


@contextmanager
def _oracle(work: Path, checkpoint: Path, prompt: list[int], max_tokens: int) -> Iterator[subprocess.Popen[bytes]]:
    """transformers in a process of its own: it and vLLM must not share a thread pool, or anything else."""
    (work / "prompts.json").write_text(json.dumps([prompt]))
    command = [sys.executable, "-W", "ignore", "-m", "m3hal.checkpoint.oracle", str(checkpoint)]
    command += [str(work / "prompts.json"), str(work / "oracle.json"), "--max-tokens", str(max_tokens)]
    with (work / "oracle.log").open("wb") as log:
        process = subprocess.Popen(command, env=_environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        _stop(process)


def _environment() -> dict[str, str]:
    """This process's, without m3hal settings that would join those on the command line."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("M3HAL_")}
    # One thread each: the model is tiny, and OpenMP's threads spin at barriers when cores are shared.
    return {**kept, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process group, then kills what is left of it."""
    for sent, patience in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, sent)
            process.wait(patience)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _await_server(server: subprocess.Popen[bytes], url: str, log: Path, say: Clock) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise DemoError(f"vLLM's server ended with code {server.returncode}.\n{_tail(log)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            say.waiting(f"waiting for the server: {_last_words(log)}")
            time.sleep(0.2)
    raise DemoError(f"vLLM's server was not ready after {START_TIMEOUT} s.\n{_tail(log)}")


def _last_words(log: Path) -> str:
    """The end of a log's last line, for people who wait; vLLM puts level, time and file before its message."""
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it starts")
    return last.rpartition("] ")[2].strip()[:80]


def _stream(url: str, model: str, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
    """Streams a completion, prints the text as it comes; the token ids, and the median seconds between two of them."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    tokens: list[int] = []
    times: list[float] = []
    print("          ", end="")
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                event = line.decode().strip().removeprefix("data: ")
                if event and event != "[DONE]":
                    choice = json.loads(event)["choices"][0]
                    tokens += choice["token_ids"]
                    times.append(time.monotonic())
                    print(choice["text"].replace("\n", " "), end="", flush=True)
    except urllib.error.HTTPError as error:
        raise DemoError(f"the server refused the request: {error.read().decode()[:400]}") from error
    print()
    return tokens, statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def _show_plan(log: Path, say: Clock) -> None:
    """Makes the server's plan here, for this terminal's width, and checks that it is the one in the server's log."""
    from m3hal import ModelShape, Policy, plan

    shape = ModelShape.from_config(
        tiny.config(DTYPE),
        dtype=DTYPE,
        page_size=tiny.TEXT_CONFIG["sparse_attention_config"]["sparse_block_size"],
        max_tokens=MAX_CONTEXT,
        max_seqs=MAX_SEQS,
        max_context=MAX_CONTEXT,
    )
    made = plan(shape, "cpu", Policy.resolve(engine=POLICY, environ={}))
    say("the plan, which implementation serves each operator and why:\n")
    print(made.table(shutil.get_terminal_size((140, 24)).columns) + "\n")
    if made.fingerprint not in log.read_text(errors="replace"):
        raise DemoError(f"the server's log does not name this plan, {made.fingerprint}.\n{_tail(log)}")


def _await_oracle(oracle: subprocess.Popen[bytes], work: Path, say: Clock) -> list[int]:
    while oracle.poll() is None:
        say.waiting("waiting for transformers")
        time.sleep(0.1)
    if oracle.returncode:
        raise DemoError(f"transformers ended with code {oracle.returncode}.\n{_tail(work / 'oracle.log')}")
    tokens: list[int] = json.loads((work / "oracle.json").read_text())[0]["tokens"]
    return tokens


def _tail(log: Path, lines: int = 30) -> str:
    """The end of a log, and what to do about it where that is known."""
    text = log.read_text(errors="replace")
    remedy = next((advice for sign, advice in REMEDIES.items() if sign in text), "`m3hal doctor` checks this machine.")
    return "\n".join(["--- end of its log", *text.splitlines()[-lines:], "---", f"Remedy: {remedy}"])


def _encode(checkpoint: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
    return ids


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    raise SystemExit(main())
