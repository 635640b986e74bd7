"""What a bug report needs in one archive: what is installed, what was asked for, what was proved. No secrets.

Every text is redacted before it is packed: the home folder becomes ``~``, and what looks like a token, a password in a
URL, or the value of a variable whose name says secret, becomes ``<redacted>``.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from m3hal._files import write_whole
from m3hal.dispatch import Policy, levels, pin
from m3hal.dispatch.discovery import Found
from m3hal.dispatch.errors import M3halError

#: variables that decide what m3hal, vLLM and the devices do
_OURS = re.compile(r"(M3HAL|VLLM|TRITON|CUDA_VISIBLE|HIP_VISIBLE|ROCR_VISIBLE|HABANA|FLASHINFER|AITER|OMP_NUM)\w*")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|AUTH", re.IGNORECASE)
#: tokens of Hugging Face, OpenAI-like services, GitHub, AWS, and bearer headers; passwords in URLs
_SECRET = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|AKIA|xox[a-z]-)[A-Za-z0-9_-]{8,}|(?<=Bearer )\S+|(?<=://)[^/\s:@\"]+:[^/\s@\"]+(?=@)"
)
_CAPTURES = 50
REDACTED = "<redacted>"


def write(path: str, contents: Mapping[str, Any], home: str) -> list[tuple[str, int]]:
    """Writes the archive whole or not at all; returns its members with their sizes. Raises M3halError."""
    packed = io.BytesIO()
    members = {f"{name}.json": redacted(json.dumps(data, indent=1), home) for name, data in contents.items()}
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(f"m3hal-bundle/{name}", text)
    try:
        write_whole(path, packed.getvalue())
    except OSError as error:
        raise M3halError(f"the bundle can't be written to {path} ({error}); name another file.") from error
    return [(name, len(text.encode())) for name, text in members.items()]


def redacted(text: str, home: str) -> str:
    """A text without the home folder and without what looks like a secret."""
    text = _SECRET.sub(REDACTED, text)
    return re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that are ours, the secret ones without their values."""
    return {
        name: REDACTED if _SECRET_NAME.search(name) else value
        for name, value in sorted(environ.items())
        if _OURS.fullmatch(name)
    }


def policy(device: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """What is asked for on this device and where each value came from, or why it can't be read."""
    try:
        asked = Policy.resolve(environ=environ).on(device)
    except M3halError as error:
        return {"error": str(error)}
    origins = {key: str(origin) for key, origin in asked.origins.items()}
    return {"device": device, "asked": asked.to_json(), "watch": asked.watch.to_json(), "origins": origins}


def captures(environ: Mapping[str, str]) -> dict[str, Any]:
    """The newest files of the folder that recordings go to, by name, size and time; not their contents."""
    try:
        folder = Path(Policy.resolve(environ=environ).watch.capture_dir)
    except M3halError:
        return {}
    files = sorted((path for path in folder.glob("*") if path.is_file()), key=lambda path: -path.stat().st_mtime)
    listed = [{"name": path.name, "bytes": path.stat().st_size, "time": path.stat().st_mtime} for path in files]
    return {"folder": str(folder), "files": listed[:_CAPTURES], "more": max(len(listed) - _CAPTURES, 0)}


def claims(backends: Iterable[Found]) -> list[dict[str, Any]]:
    """Every claim that lies beside a manifest, without its cases."""
    kept = ("backend", "distribution", "device", "environment", "suite", "executor", "counts", "tiers", "digest")
    found = levels.shipped(backends)
    return [{key: claim[key] for key in kept if key in claim} | _implementations(claim) for claim in found]


def _implementations(claim: Mapping[str, Any]) -> dict[str, Any]:
    return {"implementations": {op: list(found) for op, found in claim.get("implementations", {}).items()}}


def plan(path: str) -> Mapping[str, Any]:
    """An exported plan, e.g. the one that the engine wrote to ``M3HAL_EXPORT_PLAN``. Raises ConfigurationError."""
    return pin.read(path)
