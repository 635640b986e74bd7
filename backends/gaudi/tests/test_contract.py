"""The adapters to Habana's bridge: on its double they are the operators; where it differs, a verdict says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from m3hal_conformance.doubles import DoubleRunner, ask, failures, levels, verdicts
from m3hal_conformance.vendor import Question, cases

NORM = "torch/hpex/normalization/FusedRMSNorm.py"
ROTARY = "torch/hpex/kernels/RotaryPosEmbeddingHelper.py"


@pytest.mark.parametrize("question", cases(operators=["rms_norm", "add_rms_norm", "rope_partial"]), ids=str)
def test_conformance(runner: DoubleRunner, question: Question) -> None:
    """Every case of the suite passes, in fp32 and in bf16."""
    ask(runner, question, "captures no graphs")


def test_every_implementation_is_proved_on_the_double() -> None:
    """The claim in the package is about the files in the package: run scripts/contract_claims.py after editing them."""
    assert set(levels("gaudi", "hpu:gaudi2").values()) == {"contract"}


@pytest.mark.parametrize(
    ("operator", "file", "old", "new", "told"),
    [
        ("rms_norm", NORM, "class FusedRMSNorm(", "class RMSNorm(", "has no FusedRMSNorm any more"),
        ("add_rms_norm", NORM, "def forward(", "def setup(", "has no forward"),
        ("rms_norm", NORM, "gamma, eps,", "gamma, beta, eps,", "'beta' is new and required"),
        ("rms_norm", NORM, "bwd_mode=0", "bwd_mode=1", "'bwd_mode' is 1 unless given, not 0"),
        ("rope_partial", ROTARY, "(ctx, p, cos, sin, offset)", "(ctx, p, sin, cos, offset)",
         "no longer begin with ctx, p, cos, sin"),
        ("rope_partial", ROTARY, "(ctx, p, cos, sin, offset)", "(ctx, p, cos, sin, positions, offset)",
         "'positions' is new and required"),
        ("rope_partial", ROTARY, "(ctx, p, cos, sin, offset)", "(ctx, p, rope_cache)", "'cos' is gone, 'sin' is gone"),
    ],
)  # fmt: skip
def test_a_difference_is_a_verdict(
    edited: Callable[[str, str, str], None], operator: str, file: str, old: str, new: str, told: str
) -> None:
    """A renamed symbol, an argument more or less, another default, another order: told, with what to do about it."""
    edited(file, old, new)
    (verdict,) = verdicts("gaudi", "hpu:gaudi2", operator, "sparse_attention")
    assert (verdict.stage, verdict.accepted) == ("library", False)
    assert told in verdict.reason
    assert "install another version of the library or a newer m3hal-gaudi" in verdict.reason


@pytest.mark.parametrize(
    ("case", "file", "old", "new"),
    [
        ("rms_norm/tokens_7/bfloat16", NORM, "(normed * gamma.float())", "(normed * (gamma.float() + 1))"),
        ("rms_norm/large_eps/float32", NORM, "+ eps)", "+ 1e-6)"),
        ("add_rms_norm/tokens_7/float32", NORM, "wide = data_in.float()", "wide = data_in.bfloat16().float()"),
        ("rope_partial/pairs_apart/float32", ROTARY, "first, second = p.chunk(2, dim=-1)",
         "first, second = p[..., ::2], p[..., 1::2]"),
        ("rope_partial/page_boundary/bfloat16", ROTARY, "torch.cat([-second, first]", "torch.cat([second, -first]"),
    ],
)  # fmt: skip
def test_a_library_that_computes_something_else_is_caught(
    edited: Callable[[str, str, str], None], case: str, file: str, old: str, new: str
) -> None:
    """The contract tests can fail: other numbers behind the same signature."""
    edited(file, old, new)
    assert failures("gaudi", "hpu:gaudi2", case) == [case]


@pytest.mark.parametrize("device", ["hpu:gaudi2", "hpu:gaudi3"])
def test_both_gaudis_are_served(device: str) -> None:
    """Without the bridge installed its functions are assumed, and the plan says that nothing was probed."""
    assert verdicts("gaudi", device, "rope_partial", "sparse_attention")[0].accepted
