"""The adapters to FlashInfer: on its double they are the operators; where FlashInfer differs, a verdict says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from m3hal_conformance.doubles import DoubleRunner, ask, failures, levels, verdicts
from m3hal_conformance.vendor import Question, cases

from m3hal.ops import load

OPERATORS = ("rms_norm", "add_rms_norm", "topk_blocks")
OUTSIDE = (
    "dtype is 'float32'",
    "which it declares to need",  # 16-byte addresses
    "weight_offset is 0.0",
    "top_k_blocks is 8",
    "captures no graphs",
)
NORMS, SELECT = "norm/__init__.py", "msa_ops/sparse_topk_select.py"


@pytest.mark.parametrize("question", cases(operators=OPERATORS), ids=str)
def test_conformance(runner: DoubleRunner, question: Question) -> None:
    """Every case of the suite that the limits let through passes."""
    ask(runner, question, *OUTSIDE)


@pytest.mark.parametrize("question", cases(operators=["topk_blocks"], quick=True), ids=str)
def test_selection_does_not_need_blocks_of_minus_infinity(
    runner: DoubleRunner, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether FlashInfer ever selects a tile of -inf is not documented; the adapter is right either way."""
    monkeypatch.setattr("flashinfer.msa_ops.sparse_topk_select.SKIPS_MINUS_INF", True)
    ask(DoubleRunner("nvidia", "cuda:sm_103"), question, *OUTSIDE)


def test_halved_scores_tie_only_where_it_is_said(runner: DoubleRunner) -> None:
    """The least normal numbers and the greatest still rank by their last bit."""
    made = runner.plan("topk_blocks", cases(operators=["topk_blocks"])[0].case.site)
    run = made.bind("topk_blocks", "sparse_attention").run
    for smallest in (2.0**-125, 1.0, 3.4028e38):
        scores = torch.full((1, 1, 40), smallest).view(torch.int32).add(torch.arange(40)).view(torch.float32)
        seen = torch.tensor([40], dtype=torch.int32)
        expected = load("topk_blocks").reference(scores, seen, top_k_blocks=16, init_blocks=0, local_blocks=1)
        assert torch.equal(run(scores, seen), expected)


def test_every_implementation_is_proved_on_the_double() -> None:
    """The claim in the package is about the files in the package: run scripts/contract_claims.py after editing them."""
    assert set(levels("nvidia", "cuda:sm_100").values()) == {"contract"}


@pytest.mark.parametrize(
    ("operator", "kind", "file", "old", "new", "told"),
    [
        ("rms_norm", "moe", NORMS, "def gemma_rmsnorm(", "def gemma_norm(", "has no gemma_rmsnorm any more"),
        ("rms_norm", "drafter", NORMS, "def rmsnorm(\n    input:", "def rmsnorm(\n    x:", "'input' is gone, 'x' is"),
        ("add_rms_norm", "moe", NORMS, "    residual: torch.Tensor,\n", "    residual: torch.Tensor,\n    s: float,\n",
         "'s' is new and required"),
        ("add_rms_norm", "moe", NORMS, "    residual: torch.Tensor,\n", "", "'residual' is gone"),
        ("topk_blocks", "sparse_attention", SELECT, "    topk: int,\n    num", "    num", "'topk' is gone"),
        ("topk_blocks", "sparse_attention", SELECT, "force_end_blocks: int = 0", "force_end_blocks: int = 1",
         "'force_end_blocks' is 1 unless given, not 0"),
        ("topk_blocks", "sparse_attention", "trace/templates/msa.py", '"num_qo_heads", "max_k_tiles", "total_q"',
         '"total_q", "num_qo_heads", "max_k_tiles"', "is ['total_q', 'num_qo_heads', 'max_k_tiles']"),
        ("topk_blocks", "sparse_attention", "msa_ops/__init__.py", "msa_topk_select as", "select as", "has no select"),
    ],
)  # fmt: skip
def test_a_difference_is_a_verdict(
    edited: Callable[[str, str, str], None], operator: str, kind: str, file: str, old: str, new: str, told: str
) -> None:
    """A renamed symbol, an argument more or less, another default, another layout: told, with what to do about it."""
    edited(file, old, new)
    found = verdicts("nvidia", "cuda:sm_100", operator, kind)
    reason = next(verdict.reason for verdict in found if verdict.stage == "library")
    assert told in reason
    assert "install another version of the library or a newer m3hal-nvidia" in reason
    assert not any(verdict.accepted for verdict in found)


@pytest.mark.parametrize(
    ("case", "file", "old", "new"),
    [
        ("rms_norm/tokens_7/bfloat16", NORMS, "(weight.float() + offset)", "weight.float()"),
        ("rms_norm/large_eps/bfloat16", NORMS, "+ eps)", "+ 1e-6)"),
        ("rms_norm/heads_in_fused_row/bfloat16", NORMS, "return out.copy_(_normalized(x.float()",
         "return out.copy_(_normalized(x.as_strided(x.shape, out.stride()).float()"),
        ("add_rms_norm/cancelling/bfloat16", NORMS, "input.float() + residual.float()", "input.float()"),
        ("add_rms_norm/tokens_7/bfloat16", NORMS, "    residual.copy_(total)\n", ""),
        ("topk_blocks/around_k/float32", SELECT, "torch.sort(-scores", "torch.sort(scores"),
        ("topk_blocks/around_k/float32", SELECT, "value=valid).sort(-1)", "value=valid).sort(-1, descending=True)"),
        ("topk_blocks/all_equal/float32", SELECT, "torch.sort(-scores, dim=-1, stable=True).indices",
         "torch.sort(scores, dim=-1, stable=True).indices.flip(-1)"),
        ("topk_blocks/around_k/float32", SELECT, "max_score.permute(2, 0, 1)", "max_score.view(tokens, heads, tiles)"),
    ],
)  # fmt: skip
def test_a_library_that_computes_something_else_is_caught(
    edited: Callable[[str, str, str], None], case: str, file: str, old: str, new: str
) -> None:
    """The contract tests can fail: other numbers, another order or another layout behind the same signature."""
    edited(file, old, new)
    assert failures("nvidia", "cuda:sm_100", case) == [case]


def test_an_optional_addition_is_none(edited: Callable[[str, str, str], None]) -> None:
    """A new parameter with a default rejects nothing."""
    edited(SELECT, "    force_end_blocks: int = 0,\n", "    force_end_blocks: int = 0,\n    stable: bool = True,\n")
    assert verdicts("nvidia", "cuda:sm_100", "topk_blocks", "sparse_attention")[0].accepted


@pytest.mark.parametrize(("device", "served"), [("cuda:sm_90", False), ("cuda:sm_100", True), ("cuda:sm_107", True)])
def test_selection_is_for_blackwell_and_later(device: str, served: bool) -> None:
    """Hopper's kernel forces blocks by scores of 1e14, which the definition forbids, so it is not offered."""
    verdict = verdicts("nvidia", device, "topk_blocks", "sparse_attention")[0]
    assert (verdict.accepted, verdict.stage) == ((True, "chosen") if served else (False, "device"))


def test_forced_blocks_must_fit() -> None:
    """More forced blocks than chosen ones are refused when planning, as the definition refuses them when called."""
    verdict = verdicts("nvidia", "cuda:sm_100", "topk_blocks", "sparse_attention", init_blocks=8, local_blocks=9)[0]
    assert verdict.stage == "predicate"
    assert "do not fit into top_k_blocks 16" in verdict.reason
