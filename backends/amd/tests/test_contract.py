"""The adapters to aiter: on its double they are the operators; where aiter differs, a verdict says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from m3hal_conformance.doubles import DoubleRunner, ask, failures, levels, verdicts
from m3hal_conformance.vendor import Question, cases

from m3hal.ops import load

from .conftest import DOUBLE

NORMS, ROUTER = "ops/rmsnorm.py", "ops/topk.py"
NORMED = "_normalized(input.float(), weight, epsilon, gemma_norm)"
OUTSIDE = ("dtype is 'float32'", "which it declares to need", "captures no graphs", "forced_routing is True")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("question", cases(operators=["rms_norm", "add_rms_norm"]), ids=str)
def test_norms(runner: DoubleRunner, question: Question) -> None:
    """Every case of the suite that the limits let through passes."""
    ask(runner, question, *OUTSIDE)


ROUTING = cases(operators=["route_topk"])
LONG = ("tokens_1000", "tokens_4096", "tokens_65", "tokens_equal_experts", "called_often")


@pytest.mark.parametrize(
    "question", [pytest.param(q, marks=[pytest.mark.slow] if any(n in str(q) for n in LONG) else []) for q in ROUTING],
    ids=str,
)  # fmt: skip
def test_router(runner: DoubleRunner, question: Question) -> None:
    """Every case passes, its Triton kernel interpreted; those of many rows are slow so."""
    ask(runner, question, *OUTSIDE)


@pytest.mark.parametrize("places", [[], [2], [0, 1], [3, 77], [0, 2, 100], [4, 5, 6], [0, 1, 2, 3], [9, 8, 7, 6, 5]])
def test_rows_with_fewer_numbers_than_choices(runner: DoubleRunner, places: list[int]) -> None:
    """Where NaN leaves it too few experts aiter names one twice; what comes out is the definition's choice."""
    site = ROUTING[0].case.site
    run = runner.plan("route_topk", site).bind("route_topk", "moe").run
    logits, bias = torch.full((2, 128), NAN), torch.linspace(-1, 1, 128)
    logits[0, places] = torch.randn(len(places), generator=torch.Generator().manual_seed(len(places)))
    logits[1, 5:] = -INF
    expected = load("route_topk").reference(logits, bias, **load("route_topk").static_values(site))
    weights, ids = run(logits, bias)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0])


def test_the_double_has_aiters_fault(runner: DoubleRunner) -> None:
    """The test above is about something: alone, aiter's kernel repeats an expert and weighs it twice."""
    from aiter.ops.topk import biased_grouped_topk_hip

    logits = torch.full((1, 8), NAN)
    logits[0, 2] = 1.0
    weights, ids = torch.empty(1, 4), torch.empty(1, 4, dtype=torch.int32)
    biased_grouped_topk_hip(logits, torch.zeros(8), weights, ids, 1, 1, False, 1.0)
    assert ids.tolist() == [[2, 1, 2, 3]]
    assert weights.isnan().tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_routers_kernel_compiles(architecture: str, tmp_path: Path) -> None:
    """Triton makes AMD machine code of it, without a GPU; the interpreter takes what its compiler refuses."""
    code = f"""if True:
        import sys; sys.path.insert(0, {str(DOUBLE)!r})
        import triton
        from m3hal_amd.routing import _finish
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        types = dict(weights="*fp32", ids="*i32", tokens="i32", scale="fp32")
        constants = dict(K=4, SLOTS=4, RENORMALIZE=True, ROWS=16)
        source = ASTSource(_finish, types | dict.fromkeys(constants, "constexpr"), constants)
        made = triton.compile(source, target=GPUTarget("hip", {architecture!r}, 64))
        assert "{architecture}" in made.asm["amdgcn"] and ".vgpr_spill_count: 0" in made.asm["amdgcn"]
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_implementation_is_proved_on_the_double() -> None:
    """The claim in the package is about the files in the package: run scripts/contract_claims.py after editing them."""
    assert set(levels("amd", "hip:gfx950").values()) == {"contract"}


@pytest.mark.parametrize(
    ("operator", "file", "old", "new", "told"),
    [
        ("rms_norm", NORMS, "def rmsnorm(", "def rms_norm(", "has no rmsnorm any more"),
        ("rms_norm", NORMS, "(out: Tensor, input: Tensor, weight", "(input: Tensor, out: Tensor, weight",
         "no longer begin with out, input"),
        ("rms_norm", NORMS, "epsilon: float, gemma_norm: bool = False)", "epsilon: float)", "'gemma_norm' is gone"),
        ("add_rms_norm", NORMS, "    residual_out: Tensor,\n", "", "'residual_out' is gone"),
        ("add_rms_norm", NORMS, "use_model_sensitive_rmsnorm: int = 0", "use_model_sensitive_rmsnorm: int = 1",
         "'use_model_sensitive_rmsnorm' is 1 unless given, not 0"),
        ("route_topk", ROUTER, "need_renorm: bool,\n", "need_renorm: bool,\n    score_func: str,\n",
         "'score_func' is new and required"),
        ("route_topk", ROUTER, "    topk_weights: torch.Tensor,\n    topk_ids: torch.Tensor,\n",
         "    topk_ids: torch.Tensor,\n    topk_weights: torch.Tensor,\n", "no longer begin with gating_output"),
    ],
)  # fmt: skip
def test_a_difference_is_a_verdict(
    edited: Callable[[str, str, str], None], operator: str, file: str, old: str, new: str, told: str
) -> None:
    """A renamed symbol, an argument more or less, another default, another order: told, with what to do about it."""
    edited(file, old, new)
    (verdict,) = verdicts("amd", "hip:gfx950", operator)
    assert (verdict.stage, verdict.accepted) == ("library", False)
    assert told in verdict.reason
    assert "install another version of the library or a newer m3hal-amd" in verdict.reason


@pytest.mark.parametrize(
    ("case", "file", "old", "new"),
    [
        ("rms_norm/tokens_7/bfloat16", NORMS, "1.0 if gemma else 0.0", "0.0"),
        ("rms_norm/plain_weight/bfloat16", NORMS, "1.0 if gemma else 0.0", "1.0"),
        ("rms_norm/tokens_4096/bfloat16", NORMS, f"out.copy_({NORMED})",
         f"out.copy_(({NORMED}.view(torch.int32) & -65536).view(torch.float32))"),
        ("add_rms_norm/cancelling/bfloat16", NORMS, "input.float() + residual_in.float()", "residual_in.float()"),
        ("add_rms_norm/tokens_7/bfloat16", NORMS, "residual_out.copy_(total)", "residual_out.copy_(input)"),
        ("route_topk/bias_far_above/float32", ROUTER, "score.gather(1, expert[:, None])[:, 0]",
         "(best - correction_bias[expert])"),
        ("route_topk/bias_decides/float32", ROUTER, "left = score + correction_bias", "left = score.clone()"),
    ],
)  # fmt: skip
def test_a_library_that_computes_something_else_is_caught(
    edited: Callable[[str, str, str], None], case: str, file: str, old: str, new: str
) -> None:
    """The contract tests can fail: other numbers behind the same signature, older aiters' weights among them, and bf16
    by truncation, which is what aiter does on gfx942."""
    edited(file, old, new)
    assert failures("amd", "hip:gfx950", case) == [case]


@pytest.mark.parametrize("operator", ["rms_norm", "add_rms_norm"])
def test_bf16_norms_are_not_for_gfx942(operator: str) -> None:
    """On MI300 aiter stores bf16 by truncation, which is not the definition's rounding; the router is fp32."""
    assert verdicts("amd", "hip:gfx950", operator)[0].accepted
    assert verdicts("amd", "hip:gfx942", operator)[0].stage == "device"
    assert verdicts("amd", "hip:gfx942", "route_topk")[0].accepted
