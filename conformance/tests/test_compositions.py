"""Fused operators composed of definitions that each round: what their own cases say of such a composition."""

from __future__ import annotations

from typing import Any

import pytest
from m3hal_conformance.case import Case
from m3hal_conformance.runner import Offer, Runner
from m3hal_conformance.suite import select

from m3hal import ops
from m3hal.dispatch.bind import Bound
from m3hal.dispatch.compose import compose
from m3hal.reference import bind_definition

FUSED = ("qk_norm_rope_insert", "qkv_norm_rope_insert", "select_blocks", "sparse_decoder_layer")
#: every eleventh of their cases but those that need a device or a compiler
CASES = [c for c in select(operators=FUSED) if c.sizes == "cpu" and not c.lazy and "captured" not in c.id][::11]


def composed(name: str, site: Any) -> Bound:
    """An operator as a plan binds it where nothing fused is there: compositions of compositions of definitions."""
    operator = ops.load(name)
    if not operator.covers:
        return Bound(name, site, bind_definition(operator, site), "reference", name)
    parts = {part: composed(part, site) for part in operator.covers}
    kernel, known = compose(operator, site, parts), {trait.name for trait in operator.traits}
    declared = {name: value for part in parts.values() for name, value in part.traits.items() if name in known}
    return Bound(name, site, kernel.run, "composed", name, traits={**operator.composed_traits, **declared})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_composition_is_within_its_bounds(case: Case) -> None:
    """It rounds between its parts, says so where that is a freedom, and passes."""
    runner = Runner("reference", "cpu")
    runner._offers[case.operator, case.site, case.layout] = Offer(composed(case.operator, case.site), None)
    result = runner.run_case(case)
    assert result.status == "pass", result.reason or result.sentence
