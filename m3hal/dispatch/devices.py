"""Devices by name, and which of them this machine has, asked without initialising any of them."""

from __future__ import annotations

import difflib
import fnmatch
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from m3hal.dispatch.errors import ConfigurationError

#: Kinds that :func:`detect` knows how to look for. Others are legal; their backend's probe decides.
KINDS = ("cpu", "cuda", "hip", "hpu")
#: what architectures of those with several are called, with an example
ARCHITECTURES = {
    "cuda": (re.compile(r"sm_\d{2,3}"), "cuda:sm_90"),
    "hip": (re.compile(r"gfx[0-9a-f]{3,4}"), "hip:gfx950"),
    "hpu": (re.compile(r"gaudi\d?"), "hpu:gaudi2"),
}
EXAMPLES = ("cpu", *(example for _, example in ARCHITECTURES.values()))
#: how alike a slip is at least: npu and xpu are others' kinds, no slips of hpu
_ALIKE = 0.75
_NAME = re.compile(r"[a-z][a-z0-9_]*(:[A-Za-z0-9_.-]+)?")


@dataclass(frozen=True)
class Detected:
    """One device of this machine. memory: bytes, 0 when unknown. source: what said so."""

    device: str
    label: str
    memory: int
    source: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check(device: str) -> str:
    """The device's name, if it is one: ``kind`` or ``kind:architecture``. Raises ConfigurationError with an example."""
    if not _NAME.fullmatch(device):
        raise ConfigurationError(f"{device!r} is not a device; write kind:architecture, e.g. 'cuda:sm_90', or 'cpu'.")
    kind, colon, architecture = device.partition(":")
    if not colon and kind in ARCHITECTURES:
        raise ConfigurationError(
            f"device {device!r} needs its architecture, e.g. {ARCHITECTURES[kind][1]!r}; "
            "`m3hal devices` lists this machine's."
        )
    if colon and (kind == "cpu" or (kind in ARCHITECTURES and not ARCHITECTURES[kind][0].fullmatch(architecture))):
        raise ConfigurationError(f"{device!r} is no device. Did you mean {meant(device)!r}?")
    return device


def meant(name: str) -> str | None:
    """The device that is likely meant by what is none: ``cuda:sm_90`` by ``cuda:sm90``, or by ``gpu:sm_90``."""
    kind, colon, architecture = name.lower().partition(":")
    if kind not in KINDS:
        formed = [known for known, (form, _) in ARCHITECTURES.items() if form.fullmatch(architecture)]
        near = formed or difflib.get_close_matches(kind, KINDS, n=1, cutoff=_ALIKE)
        if not near:
            whole = [] if colon else difflib.get_close_matches(kind, EXAMPLES, n=1, cutoff=_ALIKE)
            return next(iter(whole), None)
        kind = near[0]
    if kind not in ARCHITECTURES:
        return kind
    form, example = ARCHITECTURES[kind]
    number = re.search(r"\d[\da-f]*", architecture.replace(".", ""))
    spelt = example.partition(":")[2].rstrip("0123456789") + (number[0] if number else "")
    return f"{kind}:{spelt}" if number and form.fullmatch(spelt) else example


def kind(device: str) -> str:
    """``cuda`` of ``cuda:sm_90``."""
    return device.partition(":")[0]


def matches(device: str, patterns: Iterable[str]) -> bool:
    """Whether a device is among patterns such as ``"hip:gfx95*"``.

    A bare kind, which is all that vLLM's platforms tell of kinds that m3hal can't look for, is one of ``"acme:*"``.
    """
    names = (device,) if ":" in device else (device, f"{device}:")
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def is_present(device: str) -> bool:
    """Whether this machine has the device. A kind that m3hal can't look for counts as present: its probe decides."""
    if kind(device) == "cpu" or kind(device) not in KINDS:
        return True
    return any(found.device == device for found in detect())


@cache
def detect() -> tuple[Detected, ...]:
    """The devices of this machine, accelerators first."""
    return (*_cuda(), *_hip(), *_hpu(), _cpu())


def _cpu() -> Detected:
    label = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                label = line.partition(":")[2].strip()
                break
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        memory = 0
    return Detected("cpu", f"{label}, {os.cpu_count()} cores", memory, platform.system().lower())


def _cuda() -> list[Detected]:
    rows = _query("nvidia-smi", "--query-gpu=compute_cap,name,memory.total", "--format=csv,noheader,nounits")
    found = []
    for capability, name, mebibytes in (row for row in rows if len(row) == 3):
        arch = "sm_" + capability.replace(".", "")
        found.append(Detected(f"cuda:{arch}", name, _integer(mebibytes) << 20, "nvidia-smi"))
    return found


def _hip(root: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> list[Detected]:
    """ROCm's kernel driver lists nodes; CPUs among them have gfx_target_version 0, a GPU e.g. 90500 = gfx950."""
    found = []
    for node in sorted(root.glob("*"), key=lambda path: _integer(path.name)):
        properties = dict(line.split(None, 1) for line in _read(node / "properties").splitlines() if " " in line)
        version = _integer(properties.get("gfx_target_version", "0"))
        if version == 0:
            continue
        major, minor, step = version // 10000, version // 100 % 100, version % 100
        arch = f"gfx{major}{minor:x}{step:x}"
        memory = sum(
            _integer(line.split()[1])
            for bank in node.glob("mem_banks/*/properties")
            for line in _read(bank).splitlines()
            if line.startswith("size_in_bytes")
        )
        found.append(Detected(f"hip:{arch}", _read(node / "name").strip() or arch, memory, "kfd"))
    return found


def _hpu(root: Path = Path("/sys/class/accel")) -> list[Detected]:
    """Gaudi's driver puts device_type into sysfs; hl-smi knows names and memory when it is installed."""
    kinds = [_read(node / "device" / "device_type").strip().lower() for node in sorted(root.glob("accel*"))]
    kinds = [match[0] for text in kinds if (match := re.search(r"gaudi\d?", text))]
    rows = [row for row in _query("hl-smi", "-Q", "name,memory.total", "-f", "csv,noheader") if len(row) == 2]
    if not kinds:
        kinds = [_gaudi_of_board(name) for name, _ in rows]
    found = []
    for index, arch in enumerate(kinds):
        name, memory = rows[index] if index < len(rows) else (arch, "0")
        found.append(Detected(f"hpu:{arch}", name, _integer(memory) << 20, "hl-smi" if rows else "sysfs"))
    return found


def _gaudi_of_board(name: str) -> str:
    """HL-205 carries the first Gaudi, HL-225 and HL-288 carry Gaudi 2, HL-325, HL-338 and HL-388 Gaudi 3."""
    board = re.match(r"hl-(\d)(\d)", name.lower())
    if board is None or board[1] == "1" or board[1] + board[2] == "20":
        return "gaudi"
    return f"gaudi{board[1]}"


def _query(program: str, *arguments: str) -> list[list[str]]:
    """Comma-separated rows of a vendor's query tool; none when it is missing or fails."""
    path = shutil.which(program)
    if path is None:
        return []
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _integer(text: str) -> int:
    match = re.match(r"\d+", text.strip())
    return int(match[0]) if match else 0
