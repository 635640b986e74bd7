"""Cases asked by several processes, and of implementations that declare what a policy requires."""

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
from m3hal_conformance import jobs
from m3hal_conformance.claim import make_claim
from m3hal_conformance.reports import facts, rerun
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal.dispatch import M3halError

CASES = select(ids=("rms_norm/one_token", "rms_norm/no_token"))


def test_several_processes_find_what_one_finds():
    """The results of two are those of one, in the order of the cases, and progress is told in it."""
    told = []
    found = jobs.run(Runner("reference", "cpu", seed=3), CASES, 2, lambda case, result: told.append(case.id))
    wanted = jobs.run(Runner("reference", "cpu", seed=3), CASES, 1)
    assert [replace(result, seconds=0.0) for result in found] == [replace(result, seconds=0.0) for result in wanted]
    assert told == [case.id for case in CASES]


@pytest.mark.parametrize(("asked", "cores", "started"), [(10**30, 3, 3), (64, 1, 2), (64, 8, 4), (2, 8, 2), (1, 8, 0)])
def test_no_more_processes_than_cores_and_cases(monkeypatch, asked, cores, started):
    """Each imports torch: 64 on a laptop would wait for each other, and for memory."""
    counts = []

    class Counted(ThreadPoolExecutor):
        def __init__(self, workers, context, begin, given):
            counts.append(workers)
            super().__init__(1, initializer=begin, initargs=given)

    monkeypatch.setattr(jobs, "ProcessPoolExecutor", Counted)
    monkeypatch.setattr(jobs, "_cores", lambda: cores)
    assert len(CASES) == 4
    assert [result.status for result in jobs.run(Runner("reference", "cpu"), CASES, asked)] == ["pass"] * 4
    assert counts == [started] * (started > 0)


def test_process_that_ends_is_told():
    """A backend that ends its process leaves no result; the sentence says what to do."""
    answer = Future()
    answer.set_exception(BrokenProcessPool("terminated abruptly"))
    with pytest.raises(M3halError, match=r"rms_norm/one_token.* --jobs 1 "):
        jobs._answered(CASES[0], answer)


@pytest.mark.parametrize("operator", ["moe_experts", "sparse_attention", "paged_attention", "select_blocks", "linear"])
def test_what_is_required_is_what_is_asked(operator):
    """With a trait required the plan takes the variant that declares it, though a faster one stands before it."""
    (case, *_) = select(operators=(operator,))
    chosen = {}
    for require in ((), ("batch_invariant",)):
        plan = Runner("triton", "cuda:sm_90", require=require).plan(operator, case.site, case.layout)
        chosen[require] = plan.choice(operator, case.site.kind).chosen.impl
    assert chosen[()].traits.get("batch_invariant") != "yes"
    assert chosen["batch_invariant",].traits["batch_invariant"] == "yes"


def test_claim_says_what_was_required():
    """A claim, what is shown of it and the command that asks a case again name the trait; who lacks it isn't asked."""
    runner = Runner("reference", "cpu", require=("batch_invariant",))
    cases = select(ids=("sparse_attention/decode",))[:1]
    results = runner.run(cases)
    claim = make_claim(runner, cases, results, {})
    assert "the policy requires batch_invariant=yes" in results[0].reason
    assert claim["require"] == ["batch_invariant"]
    assert "that declare batch_invariant" in facts(claim)["backend"]
    assert rerun(claim, cases[0].id).endswith(" --require batch_invariant")
