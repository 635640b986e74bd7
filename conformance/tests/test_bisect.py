"""How a bisection decides, on made-up runs; tests/vllm has real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from m3hal_conformance import bisect
from m3hal_conformance.bisect import Question, Run

from m3hal import MINIMAX_M3, ModelShape, Policy, plan
from m3hal.dispatch import VLLM_HOLDS, M3halError

SAID = ((5, 6, 7), (-0.1, -0.2, -0.3))
OTHERWISE = ((5, 9, 7), (-0.1, -2.0, -0.3))


def row(operator, layer, first=None, backend="acme"):
    failed = 0 if first is None else 2
    return {
        "operator": operator,
        "layer": layer,
        "backend": backend,
        "compared": 3,
        "failed": failed,
        "first": first,
        "worst": 9.0 if failed else 0.5,
        "capture": f"{operator}.pt" if failed else "",
    }


def run_of(*rows, said=SAID):
    return Run(*said, rows, 300)


@pytest.fixture
def question(tmp_path):
    shape = ModelShape.from_config(
        MINIMAX_M3, dtype="float32", page_size=128, max_tokens=512, max_seqs=1, max_context=4096
    )
    policy = Policy.resolve({"backend": "reference"}, environ={})
    made = plan(shape, "cpu", policy, engine=VLLM_HOLDS)
    return Question("model", "prompt", 3, policy, made, {}, tmp_path)


@pytest.fixture
def engines(monkeypatch):
    """``engines(answer)``: runs are answered by ``answer(name, overrides)``; returns what was asked."""

    def use(answer):
        asked = []

        def fake(question, name, overrides, say, *, watched=True):
            asked.append((name, tuple(overrides), watched))
            return answer(name, overrides)

        monkeypatch.setattr(bisect, "_run", fake)
        monkeypatch.setattr(bisect, "replay", lambda *_: type("Result", (), {"status": "fail"}))
        return asked

    return use


def test_the_earliest_mismatch_is_named_and_confirmed(question, engines):
    """Not the first row, and not the worst: the one whose first mismatch came first."""
    rows = (row("swiglu_oai", "0", first=8), row("rms_norm", "0"), row("rms_norm", "1", first=4))
    asked = engines(lambda name, overrides: run_of() if overrides else run_of(*rows))
    found = bisect.bisect(question, print)
    assert (found.first["operator"], found.first["layer"]) == ("rms_norm", "1")
    assert [other["operator"] for other in found.others] == ["swiglu_oai"]
    assert (found.culprit, found.cleared, found.replayed) == ("rms_norm", True, True)
    assert asked == [("shadow", (), True), ("shadow", ("rms_norm",), True)]


def test_a_second_fault_is_not_confirmed_away(question, engines):
    """With another operator still outside its bound the first alone was not at fault."""
    second = row("moe_experts", "1", first=9)
    engines(lambda name, overrides: run_of(second) if overrides else run_of(row("rms_norm", "1", first=4), second))
    assert not bisect.bisect(question, print).cleared


def test_a_fused_operator_is_swapped_with_its_parts(question, engines):
    """The reference composes it, so its parts must be the reference's, too."""
    fault = row("qk_norm_rope_insert", "1", first=1)
    asked = engines(lambda name, overrides: run_of() if overrides else run_of(fault))
    bisect.bisect(question, print)
    assert asked[1][1] == ("qk_norm_rope_insert", "rms_norm", "rope_partial", "kv_write")


def test_the_reference_needs_one_run(question, engines):
    """Nothing to swap."""
    asked = engines(lambda name, overrides: run_of(row("rms_norm", "1", backend="reference")))
    assert bisect.bisect(question, print).culprit == ""
    assert len(asked) == 1


def test_nothing_outside_and_the_same_words(question, engines):
    """A backend whose calls stay inside and whose tokens are the reference's is right after two runs."""
    asked = engines(lambda name, overrides: run_of(row("rms_norm", "1"), row("moe_experts", "1")))
    found = bisect.bisect(question, print)
    assert found.culprit == ""
    assert [name for name, _, _ in asked] == ["shadow", "reference"]


def test_a_fault_that_no_call_shows_is_found_by_swapping(question, engines):
    """Operators are taken from the reference one after the other until what is said agrees."""

    def answer(name, overrides):
        good = name == "reference" or "moe_experts" in overrides
        return run_of(row("rms_norm", "1"), row("moe_experts", "1"), said=SAID if good else OTHERWISE)

    asked = engines(answer)
    found = bisect.bisect(question, print)
    assert (found.first, found.culprit, found.cleared) == (None, "moe_experts", True)
    assert [name for name, _, _ in asked] == ["shadow", "reference", "swap-rms_norm", "swap-moe_experts"]
    assert "linear" not in asked[1][1]  # vLLM holds it, and can't be overridden


def test_a_fault_that_no_single_swap_removes_is_said_so(question, engines):
    """It is a fault all the same."""
    engines(lambda name, _: run_of(row("rms_norm", "1"), said=SAID if name == "reference" else OTHERWISE))
    found = bisect.bisect(question, print)
    assert (found.culprit, found.cleared) == ("none alone", False)


def test_distance_ends_at_the_first_token_that_differs():
    """What follows another token is another text."""
    late = ((5, 9, 1), (-0.1, -0.25, -40.0))
    assert bisect._apart(Run(*SAID, (), 1), Run(*late, (), 1)) == pytest.approx(0.05)
    assert bisect._apart(Run(*SAID, (), 1), Run(*SAID, (), 1)) == 0


def test_an_engine_that_ends_badly_is_a_sentence(question, monkeypatch):
    """With its code and the end of its log."""
    monkeypatch.setattr(bisect.sys, "executable", "/bin/false")
    with pytest.raises(M3halError, match=r"the engine ended with code 1; its log is .*engine\.log"):
        bisect.bisect(question, print)
    job = json.loads((Path(question.folder) / "shadow" / "job.json").read_text())
    assert job["config"]["mode"] == "shadow"
    assert job["config"]["sample_rate"] == 1


def test_ranks_are_joined():
    """One row per operator and layer: calls of both ranks, the earlier mismatch's file, the worse place."""
    one = {**row("rms_norm", "1", first=7), "worst": 40.0, "sentence": "worse", "capture": "late.pt"}
    other = {**row("rms_norm", "1", first=3), "worst": 9.0, "sentence": "better", "capture": "early.pt"}
    (joined,) = bisect._joined([[one], [other]])
    assert (joined["compared"], joined["failed"]) == (6, 4)
    assert (joined["first"], joined["capture"]) == (3, "early.pt")
    assert (joined["worst"], joined["sentence"]) == (40.0, "worse")
    (joined,) = bisect._joined([[row("rms_norm", "1")], [other]])
    assert (joined["first"], joined["failed"], joined["worst"]) == (3, 2, 9.0)
