"""Operators of several ranks and of drafting, composed of a vendor's parts: what runs without a fused form."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select

from m3hal import ops
from m3hal.dispatch import Impl, Kernel, Manifest, at_least, register, unregister
from m3hal.ops import ExpertWeights
from m3hal.reference import bind_definition
from m3hal.shape import Site

PARTS = ("add_rms_norm", "moe_experts", "linear", "swiglu_oai")


@dataclass(frozen=True)
class Packed:
    """Weights in a form that only their own kernel reads; they hold no shared expert, which the composition adds."""

    hidden: tuple[ExpertWeights]


def pack(experts: ExpertWeights) -> Packed:
    assert isinstance(experts, ExpertWeights)
    assert experts.shared is None
    return Packed((experts,))


def factory(operator: str) -> Any:
    def make(site: Site) -> Any:
        right = bind_definition(ops.load(operator), site)
        if operator != "moe_experts":
            return right

        def run(x: Any, weights: Any, ids: Any, experts: Packed, out: Any = None) -> Any:
            return right(x, weights, ids, *experts.hidden, out=out)

        return Kernel(run, prepare_weights=pack)

    return make


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """A backend of four core operators, which are the definitions; their compositions are not."""
    module = SimpleNamespace(**{name: factory(name) for name in PARTS}, __spec__=None)
    monkeypatch.setitem(sys.modules, "m3hal_parts", module)  # type: ignore[arg-type]
    limits = (at_least("shared_intermediate_size", 0),)
    impls = {name: (Impl(f"m3hal_parts:{name}", memory="self", limits=limits),) for name in PARTS}
    register(Manifest("parts", "m3hal tests", ">=1,<2", ("cpu",), impls, priority=-1))
    try:
        yield Runner("parts", "cpu")
    finally:
        unregister("parts")


@pytest.mark.parametrize("operator", ["allreduce_add_rms_norm", "mega_moe", "draft_block_sample"])
def test_compositions_pass(operator: str, runner: Runner) -> None:
    """What parts in bf16 round between themselves is declared and within the bounds; experts are packed once."""
    cases = [case for case in select(operators=[operator], quick=True) if len(case.checks) > 3]
    assert len(cases) > 15
    failed = {result.case: result.sentence for result in runner.run(cases) if result.status != "pass"}
    assert failed == {}
    offer = runner.offer(operator, cases[-1].site, "hnd")
    assert offer.impl is None
    assert set(offer.bound.traits) == set(ops.load(operator).composed_traits)


def test_compositions_pack_what_their_parts_pack(runner: Runner) -> None:
    """The composition's prepare_weights is made of its part's, and leaves the shared expert alone."""
    (case,) = select(ids=["mega_moe/alone/float32"])
    bound = runner.offer("mega_moe", case.site, "hnd").bound
    assert bound.prepare_weights is not None
    experts = case.inputs()["experts"]
    packed = bound.prepare_weights(experts)
    assert isinstance(packed.routed, Packed)
    assert packed.shared is experts.shared
