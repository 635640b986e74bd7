"""Checksums that came with the source: only they can tell a flipped weight bit from a weight."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from m3hal.checkpoint.convert.errors import ConversionError

SUMS = "SHA256SUMS"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def known_sums(folder: Path, shards: Mapping[str, object]) -> dict[str, str]:
    """Shard -> SHA-256, from a SHA256SUMS file or from what ``hf download`` and the Hugging Face cache keep."""
    listed = dict[str, str]()
    if (folder / SUMS).exists():
        for line in _text(folder / SUMS).splitlines():
            digest, _, name = line.partition(" ")
            listed[name.lstrip(" *")] = digest.lower()
    found = {name: listed.get(name) or _of_download(folder, name) for name in shards}
    return {name: digest for name, digest in found.items() if digest and _SHA256.fullmatch(digest)}


def check_sum(path: Path, expected: str) -> None:
    """Reads the whole file. Raises ConversionError when it isn't the file that was published."""
    with open(path, "rb", buffering=0) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ConversionError(
            f"{path} is damaged: its SHA-256 is {found[:16]}... and {expected[:16]}... was published; download it again"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConversionError(
            f"{path}, which should hold checksums, can't be read ({error}); mend or remove it"
        ) from None


def _of_download(folder: Path, name: str) -> str | None:
    """``hf download --local-dir`` writes the sum beside the file; the cache names the file behind the link after it."""
    beside = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    if beside.exists():
        lines = _text(beside).splitlines()
        return lines[1].strip('"') if len(lines) > 1 else None
    path = folder / name
    return path.readlink().name if path.is_symlink() else None
