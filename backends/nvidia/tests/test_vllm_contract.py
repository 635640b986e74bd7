"""The adapter to vLLM's kernels: on their double it is the operator; where vLLM differs, a verdict says so."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from m3hal_conformance.case import make_site
from m3hal_conformance.doubles import DoubleRunner, ask, standing_in, verdicts
from m3hal_conformance.vendor import Question, cases

from m3hal.dispatch import Kernel, discovery
from m3hal.layouts import KVLayout, PagedCache
from m3hal.ops import SeqMeta

DOUBLE = Path(__file__).parent / "double_vllm"
BACKEND, DEVICE = "nvidia_vllm", "cuda:sm_90"
SPARSE = "models/minimax_m3/common/ops/sparse_attn.py"
#: cases of a verify of at most eight tokens, which vLLM's kernel gets where the limits are put aside
VERIFIES = (
    "verify_all_heads", "verify_nothing_before", "verify_padded", "verify_empty_rows", "verify_visible_nan",
    "verify_large_logits", "verify_block_outer", "verify_fp8_e4m3_padded", "shared_pages", "bound_too_small",
    "wide_range", "odd_address", "every_other_id",
)  # fmt: skip

# m3hal-triton's kernels serve beside vLLM's; triton decides at import whether functions are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("m3hal_triton.sparse_attention")
    from m3hal_conformance.interpreter import cure

    cure()
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="module")
def runner() -> Iterator[DoubleRunner]:
    """Meets the adapter on the double, as on an H200."""
    with standing_in(DOUBLE, "vllm", "m3hal_nvidia"):
        yield DoubleRunner(BACKEND, DEVICE)


@pytest.fixture
def unlimited(runner: DoubleRunner, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the adapter can do, beside where it is faster."""
    module = importlib.import_module("m3hal_nvidia.vllm_manifest")
    made = (module._verify("bfloat16"), module._verify("fp8_e4m3"))
    manifest = replace(module.MANIFEST, operators={"sparse_attention": made})
    monkeypatch.setattr(module, "MANIFEST", manifest)
    monkeypatch.setattr("m3hal_nvidia.vllm_msa.FEW_TOKENS", 8)
    discovery.refresh()
    yield
    monkeypatch.undo()
    discovery.refresh()


@pytest.fixture
def edited(tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Installs a double in which ``old`` is ``new`` in the attention's file."""
    with ExitStack() as stack:

        def install(old: str, new: str) -> None:
            shutil.copytree(DOUBLE, tmp_path / "double")
            path = tmp_path / "double" / "vllm" / SPARSE
            assert path.read_text().count(old) == 1, f"{old!r} must be there once"
            path.write_text(path.read_text().replace(old, new))
            stack.enter_context(standing_in(tmp_path / "double", "vllm", "m3hal_nvidia"))

        yield install


def without_lse(name: str) -> Question:
    """A case of the suite at a site like the model's, which does not ask for the log-sum-exp."""
    (question,) = [q for q in cases(operators=["sparse_attention"]) if q.case.id == f"sparse_attention/{name}/bfloat16"]
    return Question(replace(question.case, site=replace(question.case.site, return_lse=False)))


@pytest.mark.parametrize("name", VERIFIES)
def test_conformance(unlimited: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case that vLLM's kernel gets passes, through it; more tokens and heads than it is faster with count too."""
    calls = counted(monkeypatch)
    ask(DoubleRunner(BACKEND, DEVICE), without_lse(name), "captures no graphs")
    assert calls


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The token counts of vLLM's calls from now on."""
    module, calls = importlib.import_module("m3hal_nvidia.vllm_msa"), []
    shipped = module.minimax_m3_sparse_attn_decode

    def called(q: torch.Tensor, *given: object, **named: object) -> None:
        calls.append(len(q))
        shipped(q, *given, **named)

    monkeypatch.setattr(module, "minimax_m3_sparse_attn_decode", called)
    return calls


@pytest.mark.parametrize(("tokens", "each", "vllms"), [(4, 4, True), (2, 2, True), (4, 1, False), (5, 3, False)])
def test_who_serves(runner: DoubleRunner, tokens: int, each: int, vllms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token a request, or more than four in all, go to m3hal-triton's kernels, with their plan and workspace."""
    calls = counted(monkeypatch)
    module = importlib.import_module("m3hal_nvidia.vllm_msa")
    monkeypatch.setattr(module, "_blank", {(tokens, 2): lambda *given, **named: None})
    site = make_site("sparse_attention", "bfloat16", num_kv_heads=2, num_q_heads=4)
    told = []
    rest = Kernel(lambda *given: told.append((given[3], len(given[5]))), workspace_bytes=64)
    q, ids = torch.ones(tokens, 4, 128).bfloat16(), torch.zeros(tokens, 2, 16, dtype=torch.int32)
    kv = PagedCache(torch.ones(1, 2, 128, 256).bfloat16(), KVLayout("hnd", "bfloat16", 128, 2, 128, True))
    meta = SeqMeta(torch.zeros(2), torch.ones(1), torch.zeros(1, 1), each, 128)
    lengths = torch.full((8,), 9, dtype=torch.int32)
    batch = module.TokenBatch(meta, "planned", lengths, torch.zeros(8, 1, dtype=torch.int32))
    workspace = torch.empty(64, dtype=torch.uint8)
    module._run(site, rest, lambda q, *given: torch.empty_like(q), q, kv, ids, batch, None, workspace)
    assert (calls, told) == (([tokens], []) if vllms else ([], [("planned", 64)]))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("all_heads", "both.chunk(2, -1)", "both.chunk(2, -1)[::-1]"),
        ("all_heads", "[position < seen]", ""),
        ("ends", "token % decode_query_len + 1", "token % decode_query_len"),
    ],
)
def test_a_library_that_computes_something_else_is_caught(
    edited: Callable[[str, str], None], name: str, old: str, new: str
) -> None:
    """The contract tests can fail: keys for values, a key too many or too few."""
    edited(old, new)
    assert DoubleRunner(BACKEND, DEVICE).run_case(without_lse(name).case).status == "fail"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "def minimax_m3_sparse_attn_decode(",
            "def sparse_attn_decode(",
            "has no minimax_m3_sparse_attn_decode",
        ),
        ("    decode_query_len: int,\n", "", "'decode_query_len' is gone"),
        ("SPARSE_BLOCK_SIZE = 128\n", "SPARSE_BLOCK_SIZE = 64\n", "SPARSE_BLOCK_SIZE is 64"),
    ],
)
def test_a_difference_is_a_verdict(edited: Callable[[str, str], None], old: str, new: str, told: str) -> None:
    """A renamed function, an argument less, pages of another size: told, with what to do about it."""
    edited(old, new)
    found = verdicts(BACKEND, DEVICE, "sparse_attention", "sparse_attention")
    reason = next(verdict.reason for verdict in found if verdict.stage == "library")
    assert told in reason
    assert "install another version of the library" in reason


def test_pages_must_hold_one_block() -> None:
    """vLLM's block table is by blocks, so other pages are refused when planning."""
    verdict = verdicts(BACKEND, DEVICE, "sparse_attention", "sparse_attention", page_size=64)[0]
    assert (verdict.stage, verdict.accepted) == ("predicate", False)
    assert "vLLM's pages hold one block" in verdict.reason


def test_what_vllm_scores_is_no_block_score() -> None:
    """Why its indexer is withheld, on its double: a NaN key is overlooked, where the definition makes a score NaN."""
    with standing_in(DOUBLE, "vllm", "m3hal_nvidia"):
        scores = importlib.import_module("vllm.models.minimax_m3.common.ops").minimax_m3_index_score
        keys = torch.ones(1, 128, 128)
        keys[0, 5] = float("nan")
        one = torch.tensor([1], dtype=torch.int32)
        table, lens, before = torch.zeros(1, 1, dtype=torch.int32), 128 * one, 127 * one
        cu_q = torch.tensor([0, 1], dtype=torch.int32)
        found = scores(torch.ones(1, 1, 128), keys, table, cu_q, lens, before, 1, 128, 1)
    assert float(found[0, 0, 0]) == 128.0
