"""Coverage of declared limits: what a probe asks, and what it only names."""

import sys
from types import SimpleNamespace

import pytest
from m3hal_conformance.coverage import cover
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal import ops
from m3hal.dispatch import Impl, Manifest, at_least, at_most, one_of, register, unregister
from m3hal.reference import bind_definition


@pytest.fixture
def covered(monkeypatch):
    """What is covered of a backend whose one operator has the given limits and runs its definition in one case."""
    module = SimpleNamespace(__spec__=None)
    monkeypatch.setitem(sys.modules, "m3hal_limited", module)

    def made(operator, *limits):
        module.make = lambda site: bind_definition(ops.load(operator), site)
        limits = (*limits, at_least("shared_intermediate_size", 0))
        layouts = ("hnd",) if ops.load(operator).group == "cache" else ()
        entry = Impl("m3hal_limited:make", memory="self", limits=limits, layouts=layouts)
        register(Manifest("limited", "m3hal tests", ">=1,<2", ("cpu",), {operator: (entry,)}))
        runner, cases = Runner("limited", "cpu"), select(operators=(operator,), quick=True)[:1]
        results = runner.run(cases)
        assert [(result.status, result.faults) for result in results] == [("pass", [])]
        coverage, extra = cover(runner, cases, results)
        return [result.case for result in extra], " ".join(coverage["notes"])

    yield made
    unregister("limited")


@pytest.mark.parametrize(("operator", "is_asked"), [("route_topk", True), ("moe_experts", False), ("mega_moe", False)])
def test_a_probe_asks_another_question(covered, operator, is_asked):
    """A router chooses as many experts as its site says; the ids that experts take have a width of their own."""
    asked, notes = covered(operator, at_most("top_k_experts", 7))
    assert asked == [f"{operator}/limit_top_k_experts_7/float32"] * is_asked
    assert ("no case asks about it: top_k_experts = 7" in notes) == (not is_asked)
    assert ("top_k_experts = 8 is refused by its limit, yet it computes" in notes) == is_asked


@pytest.mark.parametrize(
    ("operator", "limit", "is_asked"),
    [
        ("route_topk", at_most("num_q_heads", 64), False),
        ("rms_norm", one_of("page_size", 64, 128), False),
        ("kv_read", one_of("page_size", 64, 128), False),
        ("kv_write", one_of("page_size", 64, 128), True),
        ("paged_attention", at_most("num_q_heads", 96), True),
    ],
)
def test_limits_on_what_an_operator_or_a_case_lacks_are_named(covered, operator, limit, is_asked):
    """A limit that several operators share, and a case made for its own value: neither a fault of the backend."""
    value = limit.values[0] if limit.values else int(limit.maximum)
    asked, notes = covered(operator, limit)
    assert (f"{operator}/limit_{limit.attribute}_{value}/float32" in asked) == is_asked
    assert (f"no case asks about it: {limit.attribute} = {value}" in notes) == (not is_asked)
