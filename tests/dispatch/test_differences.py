"""What differs between two exported plans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from m3hal.dispatch import Policy, plan
from m3hal.dispatch.differences import Difference, differences, differences_table
from m3hal.shape import ModelShape


@pytest.fixture
def exported(shape: ModelShape) -> dict[str, Any]:
    return plan(shape, "cpu", Policy.resolve({"backend": "reference"}, environ={})).to_json()


def test_a_plan_equals_itself(exported: dict[str, Any]) -> None:
    """Nothing is said about two plans that are the same."""
    assert differences(exported, copy.deepcopy(exported)) == []


def _row(plan: dict[str, Any], operator: str) -> dict[str, Any]:
    return next(row for row in plan["choices"] if row["operator"] == operator)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda p: p.update(device="cuda:sm_90"), Difference("device", "", "cpu", "cuda:sm_90")),
        (lambda p: p.update(in_tree=True), Difference("vLLM's own model serves", "", "no", "yes")),
        (lambda p: p["policy"].update(deny=["x"]), Difference("policy", "deny", "nothing", "x")),
        (lambda p: p["sites"]["moe"].update(num_experts=1), Difference("site moe", "num_experts", "128", "1")),
        (lambda p: p["sites"].pop("moe"), Difference("site moe", "", "there", "nothing")),
        (
            lambda p: p["layouts"]["sparse_attention"].update(layout="nhd"),
            Difference("cache layout", "sparse_attention", "hnd", "nhd"),
        ),
        (
            lambda p: _row(p, "moe_experts").update(level="hardware"),
            Difference("moe_experts at moe", "level", "declared", "hardware"),
        ),
        (
            lambda p: _row(p, "moe_experts").update(traits={"combine_dtype": "bfloat16"}),
            Difference("moe_experts at moe", "traits", "nothing", "combine_dtype=bfloat16"),
        ),
        (
            lambda p: _row(p, "route_topk").update(impl="other", impl_id="0"),
            Difference("route_topk at moe", "", "reference route_topk", "reference other"),
        ),
        (
            lambda p: p["choices"].remove(_row(p, "route_topk")),
            Difference("route_topk at moe", "", "reference route_topk", "nothing"),
        ),
        (lambda p: p["versions"].update(torch="0"), Difference("versions", "torch", "", "0")),
    ],
)
def test_each_part_is_told_once(
    exported: dict[str, Any], change: Callable[[dict[str, Any]], object], expected: Difference
) -> None:
    """One change is one row, which names its place, its part and both values."""
    other = copy.deepcopy(exported)
    change(other)
    (found,) = differences(exported, other)
    assert found == replace(expected, was=found.was if expected.about == "versions" else expected.was)
    assert found.decides is (expected.what not in ("level", "torch") and not expected.about.startswith("site"))


def test_sites_with_one_outcome_are_one_row(exported: dict[str, Any]) -> None:
    """An operator that differs alike everywhere takes one line."""
    other = copy.deepcopy(exported)
    for row in other["choices"]:
        if row["operator"] == "rms_norm":
            row["impl_id"] = "0"
    (found,) = differences(exported, other)
    assert found.about == "rms_norm at dense_attention, sparse_attention, dense_mlp, moe"
    assert "a.json" in differences_table([found], ("a.json", "b.json"))
