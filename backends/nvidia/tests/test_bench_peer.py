"""m3hal bench calls vLLM's kernels as they are: on their double they give the outputs of the definitions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from m3hal_conformance.bench import Bench
from m3hal_conformance.bench.command import measure
from m3hal_conformance.bench.rows import rows
from m3hal_conformance.bench.vllm_peer import Peer
from m3hal_conformance.doubles import standing_in


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The definitions beside vLLM's double."""
    with standing_in(Path(__file__).parent / "double_vllm", "vllm", "m3hal_nvidia"):
        yield Bench("cpu", "reference", Peer(), small=True)


@pytest.mark.parametrize("operator", ["select_blocks", "block_scores", "topk_blocks", "sparse_attention", "msa"])
def test_the_peer_has_a_column(bench: Bench, operator: str) -> None:
    """Arguments, layouts and outputs of every attention row on one of four ranks; a ratio comes of it."""
    for row in [row for row in rows(operator, True) if "TP4" in row.case]:
        work = row.prepare(bench)
        assert any(name.startswith("vllm") for name in work.calls), row.case
        if operator == "sparse_attention":
            assert any(name.startswith("vllm") for name in work.checks), row.case
        found = measure(bench, row, {}, 0)
        assert found.status == "checked", found


def test_a_peer_whose_compiled_operators_are_absent_has_no_column(bench: Bench) -> None:
    """The rest of the row stays, with the reason."""
    (row,) = [row for row in rows("qk_norm_rope_insert", True) if row.case == "bf16 TP4 5"]
    found = measure(bench, row, {}, 0)
    assert (found.status, found.peer_absent) == ("checked", "vllm's compiled operators are not loaded")


@pytest.mark.parametrize(
    ("case", "theirs"), [("bf16", {"vllm": "auto"}), ("fp8", {"vllm bf16": "auto", "vllm": "fp8"}),
                         ("nvfp4", {"vllm bf16": "auto", "vllm nvfp4 with bf16 keys": "nvfp4"}),
                         ("mxfp4", {"vllm bf16": "auto", "vllm nvfp4 with bf16 keys": "nvfp4"})]
)  # fmt: skip
def test_insertion_is_beside_bf16_and_beside_its_own_format(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, case: str, theirs: dict[str, str]
) -> None:
    """vLLM's operator is given each column's caches, all its 25 arguments, and what names the main cache's format."""
    assert bench.peer
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(bench.peer, "compiled", lambda name: lambda *values: given.append(values))
    (row,) = [row for row in rows("qk_norm_rope_insert", True) if row.case == f"{case} TP4 5"]
    work = row.prepare(bench)
    named = {}
    for name in work.calls.keys() - {"m3hal"}:
        work.calls[name][0]()
        *_, named[name], _, _, _, k_scale, _ = given[-1]
        assert len(given[-1]) == 25
        assert (k_scale is not None) == ("nvfp4" in name)
    assert named == theirs


def test_a_peer_that_computes_something_else_is_no_rival(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is checked like ours, so that it can't win by being wrong."""
    assert bench.peer
    monkeypatch.setattr(bench.peer.sparse, "minimax_m3_sparse_attn_decode", lambda *given, **named: None)
    row = next(row for row in rows("sparse_attention", True) if row.case.startswith("decode bf16 TP4"))
    found = measure(bench, row, {}, 0)
    assert found.status == "wrong"
    assert "the output of vllm is inf" in found.reason
