"""Hopper's sums of FP8 products: activations that round the other way are within bounds, wrong rounding is not."""

import pytest
import torch
from m3hal_conformance import legitimate, oracle
from m3hal_conformance.compare import MANY, compare, typical
from m3hal_conformance.suite import select
from m3hal_conformance.tolerance import bounds_for

from m3hal import ops
from m3hal.formats import e4m3

TRAITS = {"activation_format": "fp8_e4m3", "double_rounding": "bfloat16"}
SHORT = {**TRAITS, "mma_accum": "float22"}


def _scores(case, rounded, computed, declared, monkeypatch):
    """Metric -> score of the legitimate evaluation, rounding activations as ``rounded(x, scale)`` does."""
    (case,), operator = select(ids=[f"moe_experts/{case}/bfloat16"]), ops.load("moe_experts")
    if rounded is not None:
        monkeypatch.setattr(legitimate, "_rounded", lambda x, scale, traits: rounded(x.float(), scale))
    inputs = case.inputs(0)
    out = {"out": legitimate.moe_experts(case.site, computed, **inputs)}
    wanted = oracle.declared(operator, case.site, inputs, declared)
    bounds = bounds_for(operator, case.format, case.input_class, declared, "declared")
    return {score.metric: score for score in compare(operator, case.site, out, wanted, bounds)}


def _largest(x, over):
    size = x.abs().amax(-1, keepdim=True)
    return torch.where(size == 0, 1.0, size / over)


def _cut(x):
    """To E4M3, towards zero."""
    code = e4m3.encode(x)
    return e4m3.decode(code - (e4m3.decode(code).abs() > x.abs()).to(torch.uint8))


def _by(scale_of, number_of):
    def rounded(x, given):
        scale = scale_of(x) if given is None else given
        return number_of(x / scale) * scale

    return rounded


def _own(x):
    return _largest(x, 448)


WRONG = {
    "cut off": _by(_own, _cut),
    "two bits": _by(_own, lambda x: x.to(torch.float8_e5m2).float()),
    "scale of 240": _by(lambda x: _largest(x, 240), e4m3.rounded),
    "one scale": _by(lambda x: x.abs().amax().clamp(min=1e-30) / 448, e4m3.rounded),
    "power of two": _by(lambda x: torch.exp2(_own(x).log2().ceil()), e4m3.rounded),
    "saturates at 240": _by(_own, lambda x: e4m3.rounded(x.clamp(-240, 240))),
}


@pytest.mark.parametrize("case", ["fp8_e4m3_experts", "fp8_e4m3_scaled"])
def test_short_sums_are_a_freedom(case, monkeypatch):
    """Sums of 14 bits flip codes: more than is granted without the trait, and within the bounds with it."""
    assert all(score.passed for score in _scores(case, None, SHORT, SHORT, monkeypatch).values())
    assert not _scores(case, None, SHORT, TRAITS, monkeypatch)["row"].passed
    assert all(score.passed for score in _scores(case, None, TRAITS, TRAITS, monkeypatch).values())


def test_the_definitions_rounding_is_right(monkeypatch):
    """What the wrong ones are made of: with the definition's scale and codes nothing fails."""
    rounded = _by(_own, e4m3.rounded)
    assert all(score.passed for score in _scores("fp8_e4m3_experts", rounded, SHORT, SHORT, monkeypatch).values())


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_wrong_rounding_is_no_flip(wrong, monkeypatch):
    """The row in the middle shows it several times over its bound, also where the worst row may be off by as much."""
    score = _scores("fp8_e4m3_experts", wrong, SHORT, SHORT, monkeypatch)["typical"]
    assert score.error > 4 * score.bound, score


def test_the_row_in_the_middle():
    """Rows that should be zero don't count, and few rows have no middle."""
    oracle = torch.ones(2 * MANY, 4)
    oracle[MANY:] = 0
    actual = oracle.clone()
    actual[: MANY // 2] *= 1.5
    (score,) = typical("out.typical", actual, oracle, lambda output, metric: 0.1)
    assert (score.metric, score.error) == ("typical", 0.0)
    actual[: MANY // 2 + 1] *= 1.5
    assert typical("out.typical", actual, oracle, lambda output, metric: 0.1)[0].error >= 0.5
    assert typical("out.typical", actual[: MANY - 1], oracle[: MANY - 1], lambda output, metric: 0.1) == []
