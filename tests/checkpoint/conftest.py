"""Small checkpoints in M3's names: big enough for several shards, experts, and a scale in another shard."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from m3hal.checkpoint.synthetic import Synthetic, write

SMALL = Synthetic(
    layers=3,
    dense=1,
    experts=3,
    hidden=128,
    inter=64,
    dense_inter=128,
    heads=2,
    kv_heads=1,
    head_dim=64,
    vocab=32,
    shard_bytes=62_000,
)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint in Quark's layout; nobody writes into it."""
    return write(tmp_path_factory.mktemp("quark") / "source", SMALL)


def digest(folder: Path) -> dict[str, str]:
    """Every file of a folder by name, hidden ones too."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
