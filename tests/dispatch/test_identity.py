"""An implementation's hash follows its files and declarations, and nothing is imported to find it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from m3hal.dispatch import Impl, at_most, refresh
from m3hal.dispatch.identity import MissingFileError, digest, impl_id


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package on sys.path whose every module raises when it is imported."""
    folder = tmp_path / "identity_toy"
    (folder / "sub").mkdir(parents=True)
    for name in ("__init__", "norm", "sub/__init__", "sub/deep", "_shared"):
        (folder / f"{name}.py").write_text("raise RuntimeError('imported')\n")
    (folder / "kernel.cu").write_text("__global__ void k() {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    refresh()
    yield folder
    refresh()


NORM = Impl("identity_toy.norm:rms_norm")


def test_is_stable_and_imports_nothing(package: Path) -> None:
    """The same files and declarations give the same 16 digits; the package stays unimported."""
    assert impl_id("rms_norm", NORM) == impl_id("rms_norm", NORM)
    assert len(impl_id("rms_norm", NORM)) == 16
    assert "identity_toy" not in sys.modules


@pytest.mark.parametrize(
    "other",
    [
        replace(NORM, limits=(at_most("max_tokens", 8),)),
        replace(NORM, traits={"batch_invariant": "yes"}),
        replace(NORM, layouts=("hnd",)),
        replace(NORM, memory="self"),
        replace(NORM, files=("kernel.cu",)),
        replace(NORM, path="identity_toy.norm:other"),
        replace(NORM, predicate="identity_toy._shared:judge"),
    ],
    ids=lambda impl: repr(impl)[-60:],
)
def test_every_declaration_counts(package: Path, other: Impl) -> None:
    """A claim doesn't outlive a changed limit, trait, layout, file list or path."""
    assert impl_id("rms_norm", other) != impl_id("rms_norm", NORM)
    assert impl_id("add_rms_norm", NORM) != impl_id("rms_norm", NORM)


def test_every_byte_of_the_named_files_counts(package: Path) -> None:
    """The factory's module, listed files and the predicate's module; the rest of the package doesn't."""
    impl = replace(NORM, files=("kernel.cu", "sub/*.py"), predicate="identity_toy._shared:judge")
    seen = {impl_id("rms_norm", impl)}
    for name in ("norm.py", "kernel.cu", "sub/deep.py", "_shared.py"):
        (package / name).write_text((package / name).read_text() + "#\n")
        seen.add(impl_id("rms_norm", impl))
    assert len(seen) == 5
    (package / "__init__.py").write_text("raise SystemExit\n")
    assert impl_id("rms_norm", impl) in seen


@pytest.mark.parametrize(
    "path", ["identity_toy:f", "identity_toy.sub:f", "identity_toy.sub.deep:f", "identity_toy.norm:f"]
)
def test_finds_packages_and_modules(package: Path, path: str) -> None:
    """A path may name a module, a subpackage or the package itself."""
    assert impl_id("rms_norm", Impl(path))


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        (Impl("identity_toy.nrom:f"), "the package identity_toy has no module identity_toy.nrom"),
        (Impl("no_such_package.norm:f"), "there is no module no_such_package.norm"),
        (replace(NORM, files=("kernels/*.cu",)), r"the package identity_toy has no file kernels/\*.cu"),
        (replace(NORM, predicate="identity_toy.judge:f"), "the package identity_toy has no module identity_toy.judge"),
    ],
)
def test_missing_file_is_told(package: Path, impl: Impl, message: str) -> None:
    """A path that leads nowhere is found out when planning, not when serving."""
    with pytest.raises(MissingFileError, match=message):
        impl_id("rms_norm", impl)


def test_digest_ignores_the_order_of_keys() -> None:
    """Plain data hash by content."""
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest([1, 2]) != digest([2, 1])
