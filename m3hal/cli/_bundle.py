"""What a bug report needs in one archive: what is installed, what was asked for, what was proved. No secrets.

Every text is redacted before it is packed: the home folder becomes ``~``, and what looks like a token or a private key,
the user part of a URL, and the value beside a name that says secret, become ``<redacted>``.
"""

from __future__ import annotations

import io
import json
import os
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
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY|AUTH", re.IGNORECASE)
_SECRETS = (
    # by their beginnings: Hugging Face, OpenAI-like services, GitHub, GitLab, NVIDIA, npm, Docker, PyPI, Slack
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|nvapi-|npm_|dckr_pat_|pypi-|xox[a-z]-)[A-Za-z0-9_-]{8,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[A-Za-z0-9_-]{30,}",  # AWS, Google
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*",  # JSON web tokens
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"(?<=Bearer )\S+|(?<=Basic )\S+",
    r"(?<=://)[^/\s\"']+(?=@)",
)
_SECRET = re.compile("|".join(_SECRETS), re.DOTALL)
#: ``api_key=...``, ``"password": "..."``, ``?token=...``, ``--api-key ...``; not ``max_tokens=8``
_NAMED = re.compile(
    r"((?:token|secret|passw(?:or)?d|credentials?|(?:api|access|private)[_-]?key)"
    r"(?:[\"']?[=:]\s*[\"']?|\s+(?<=key )))[^\s\"'&,;]+",
    re.IGNORECASE,
)
_CAPTURES = 50
REDACTED = "<redacted>"


def write(path: str, contents: Mapping[str, Any], home: str) -> list[tuple[str, int]]:
    """Writes the archive whole or not at all; returns its members with their sizes. Raises M3halError."""
    packed = io.BytesIO()
    homes = dict.fromkeys((os.path.realpath(home), home)) if home else ()
    members = {f"{name}.json": json.dumps(_cleaned(data, *homes), indent=1) for name, data in contents.items()}
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(f"m3hal-bundle/{name}", text)
    try:
        write_whole(path, packed.getvalue())
    except OSError as error:
        raise M3halError(f"the bundle can't be written to {path} ({error}); name another file.") from error
    return [(name, len(text.encode())) for name, text in members.items()]


def home() -> str:
    """The user's folder; empty for a user who has none, as in a container that runs under another's number."""
    try:
        return str(Path.home())
    except RuntimeError:
        return ""


def _cleaned(data: Any, *homes: str) -> Any:
    """Plain data with every text in it redacted, before JSON escapes what is not ASCII."""
    if isinstance(data, Mapping):
        return {redacted(str(key), *homes): _cleaned(value, *homes) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_cleaned(value, *homes) for value in data]
    return redacted(data, *homes) if isinstance(data, str) else data


def redacted(text: str, *homes: str) -> str:
    """A text without the home folder, however it is spelt, and without what looks like a secret."""
    text = _NAMED.sub(rf"\g<1>{REDACTED}", _SECRET.sub(REDACTED, text))
    for path in homes:
        text = re.sub(rf"{re.escape(path)}(?![\w.-])", "~", text) if len(path) > 1 else text
    return text


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
    try:
        found = [(path.name, path.stat()) for path in folder.glob("*") if path.is_file()]
    except OSError as error:
        return {"folder": str(folder), "error": str(error)}
    newest = sorted(found, key=lambda file: -file[1].st_mtime)
    listed = [{"name": name, "bytes": status.st_size, "time": status.st_mtime} for name, status in newest]
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
