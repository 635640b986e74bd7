"""Backends that are nothing like the reference: static shapes, a closed library, arrays of another runtime."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal.dispatch import register, unregister

HERE = Path(__file__).parent


@pytest.fixture
def bucketed(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    import m3hal_bucketed

    register(m3hal_bucketed.MANIFEST)
    m3hal_bucketed.COMPILED.clear()
    yield m3hal_bucketed
    unregister("bucketed")


def test_static_shapes_compile_few_graphs(bucketed):
    """Cases are padded to the declared buckets; what fits none, and what is strided, is unsupported with its reason."""
    results = Runner("bucketed", "cpu").run(
        select(operators=["sparse_attention"], quick=True) + select(operators=["route_topk"])
    )
    status = Counter((result.operator, result.status) for result in results)
    assert [r.sentence for r in results if r.status == "fail"] == []
    assert status["sparse_attention", "pass"] >= 10
    assert status["route_topk", "pass"] >= 9
    assert len(bucketed.COMPILED) <= 8, bucketed.COMPILED
    reasons = {result.case: result.reason for result in results if result.status == "unsupported"}
    assert "largest declared bucket" in reasons["route_topk/tokens_1000/float32"]
    assert "strided" in reasons["route_topk/every_other_row/float32"]
    assert "zero tokens" in reasons["route_topk/no_token/float32"]


@pytest.fixture
def closed(tmp_path, monkeypatch):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("this machine has no C compiler")
    package = tmp_path / "m3hal_closed"
    shutil.copytree(HERE / "m3hal_closed", package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", package / "libacme.so", package / "acme.c", "-lm"]
    subprocess.run(command, check=True)
    (package / "acme.c").unlink()  # closed
    sys.modules.pop("m3hal_closed", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    import m3hal_closed

    register(m3hal_closed.manifest())
    yield m3hal_closed
    unregister("closed")
    sys.modules.pop("m3hal_closed", None)


def test_closed_library_passes(closed):
    """A compiled library with its own allocator and weight layout is asked like any other, and passes."""
    cases = [c for c in select(operators=["rms_norm", "moe_experts"]) if "/real" not in c.id and "_512" not in c.id]
    results = Runner("closed", "cpu").run(cases)
    assert [f"{r.case} {r.sentence}" for r in results if r.status == "fail"] == []
    passed = Counter(result.operator for result in results if result.status == "pass")
    assert passed["rms_norm"] >= 8
    assert passed["moe_experts"] >= 15


def test_numpy_example_passes():
    """The example on NumPy passes what it says it takes."""
    numpy_backend = pytest.importorskip("m3hal_example_numpy", reason="the example is not installed")
    operators = list(numpy_backend.MANIFEST.operators)
    results = Runner("numpy", "cpu").run(select(operators=operators, quick=True))
    assert [f"{r.case} {r.sentence}" for r in results if r.status == "fail"] == []
    assert {r.operator for r in results if r.status == "pass"} == set(operators)


@pytest.fixture
def private(monkeypatch):
    """Asks the backend with pages of its own."""
    monkeypatch.syspath_prepend(str(HERE))
    import m3hal_private

    def run(cases, **factories):
        register(m3hal_private.manifest(**factories))
        return Runner("private", "cpu").run(cases)

    yield run
    unregister("private")


def test_private_page_map_passes(private):
    """Caches are written by its kv_write and read by its unpack; other page maps and formats are unsupported."""
    written = select(operators=["kv_write", "kv_read", "kv_copy_blocks"], quick=True)
    read = [f"{name}/{q}" for name in ("sparse_attention", "paged_attention") for q in ("decode", "ragged", "compiled")]
    results = private(written + select(ids=[*read, "block_scores/mixed", "block_scores/page_boundaries"]))
    assert [f"{r.case} {r.sentence}" for r in results if r.status == "fail"] == []
    passed = Counter(result.operator for result in results if result.status == "pass")
    assert all(passed[name] >= 6 for name in ("kv_write", "kv_read", "kv_copy_blocks"))
    assert (passed["sparse_attention"], passed["paged_attention"], passed["block_scores"]) == (6, 6, 4)
    reasons = {result.case: result.reason for result in results if result.status == "unsupported"}
    assert "private:tiled" in reasons["kv_write/page_boundaries/float32-nhd"]


def test_errors_that_a_private_write_and_read_share_are_found(private):
    """What kv_read gets back is right, but unpack, the third reader, sees where kv_write has put it."""
    cases = select(operators=["kv_write", "kv_read"], quick=True, layouts=["hnd"])
    results = private(cases, kv_write="shifted_write", kv_read="shifted_read")
    status = {(r.operator, r.status) for r in results if r.case.split("/")[1] == "page_boundaries"}
    assert ("kv_read", "fail") not in status
    failed = [r for r in results if (r.operator, r.status) == ("kv_write", "fail")]
    assert {check.name for result in failed for check in result.failed} >= {"oracle", "bytes_decoded"}


def test_private_pages_that_nothing_unpacks_are_refused(private):
    """Without unpack there is no third reader, and no claim."""
    results = private(select(ids=["kv_write/page_boundaries"]), kv_write="write_only")
    assert "needs an unpack" in {r.case: r.sentence for r in results}["kv_write/page_boundaries/float32"]
