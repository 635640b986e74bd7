"""What only some sites ask: a shared expert, adapters, forced routing; of those that say they take it."""

from dataclasses import replace

import pytest
import torch
from m3hal_broken_zoo import MUTANTS
from m3hal_broken_zoo.matrix import installed
from m3hal_conformance.buckets import padded
from m3hal_conformance.capture import load, save
from m3hal_conformance.case import case_set_hash
from m3hal_conformance.compaction import take
from m3hal_conformance.oracle import concerning
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import all_cases, select
from m3hal_conformance.trees import tensors

from m3hal import ops

ASKED = [case for case in all_cases() if any(getattr(case.site, name) for name in ops.load(case.operator).optional)]


def test_each_is_asked():
    """Every optional attribute of an operator has cases, in each dtype that its cases have."""
    for name in ("moe_experts", "route_topk"):
        for attribute in ops.load(name).optional:
            mine = [case for case in ASKED if case.operator == name and getattr(case.site, attribute)]
            assert {case.format for case in mine} == {case.format for case in select(operators=[name])}, attribute
            assert len(mine) >= 10, attribute
            assert any(case.quick for case in mine)


def test_sites_say_what_their_inputs_hold():
    """lora_rank, the shared expert's size and format, and forced_routing are what the inputs are."""
    for case in (case for case in ASKED if case.operator in ("moe_experts", "route_topk")):
        inputs, site = case.inputs(), case.site
        if inputs.get("lora") is not None:
            assert inputs["lora"].a13.shape[2] == inputs["lora"].b2.shape[3] == site.lora_rank, case.id
        shared = inputs["experts"].shared if "experts" in inputs else None
        if shared is not None:
            plain = isinstance(shared.w2, torch.Tensor)
            width = shared.w2.shape[-1] if plain else shared.w2.data.shape[-1]
            packed = 2 if site.shared_format in ("nvfp4", "mxfp4") else 1
            assert width * packed == site.shared_intermediate_size, case.id
            assert site.shared_format == (site.dtype if plain else shared.w2.spec.format), case.id


def test_who_does_not_mention_it_is_not_asked():
    """A backend without the limit finds each such case unsupported, with the reason, and is asked all others."""
    old = next(mutant for mutant in MUTANTS if mutant.operator == "route_topk" and mutant.name == "no_bias")
    with installed(old) as runner:
        result = runner.run_case(select(ids=["route_topk/forced_all"])[0])
        usual = runner.run_case(select(ids=["route_topk/top_1"])[0])
    assert (result.status, usual.status == "unsupported") == ("unsupported", False)
    assert result.reason == (
        "forced_routing is True; its limits do not mention forced_routing, so it takes False alone"
    )


def test_the_hash_of_other_cases_stays():
    """What a site does not ask is no part of a case set's hash; what it asks is."""
    (case,) = select(ids=["route_topk/top_1"])
    assert "lora_rank" in repr(case.site)
    asked = replace(case, site=replace(case.site, forced_routing=True))
    assert case_set_hash([case]) != case_set_hash([asked])
    text = repr(case.site).partition(", shared_intermediate_size")[0] + ")"
    import hashlib

    line = f"{case.id} {text} {case.checks} {case.layout} {case.input_class} {case.sizes}"
    assert case_set_hash([case]) == hashlib.sha256(line.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", ["moe_experts/lora_beside_shared/bfloat16", "route_topk/forced_some/float32"])
def test_they_are_captured_and_replayed(name, tmp_path):
    """A recorded call keeps shared expert, adapters and forced ids, and passes on the reference."""
    (case,) = select(ids=[name])
    inputs = case.inputs()
    found = load(save(tmp_path, "call", case.operator, case.site, inputs))
    before, after = dict(tensors(inputs)), dict(tensors(found.inputs()))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[path].contiguous().view(torch.uint8), after[path].contiguous().view(torch.uint8))
               for path in before)  # fmt: skip
    assert Runner("reference", "cpu").run_case(found).status == "pass"


def test_a_captured_call_keeps_the_adapters_of_the_experts_that_it_keeps():
    """Of many experts those in use stay, and with them their rows of the adapters."""
    (case,) = select(ids=["moe_experts/lora_adapters/float32"])
    inputs = case.inputs()
    twice = {name: getattr(inputs["lora"], name).repeat(1, 4, 1, 1) for name in ("a13", "b13", "a2", "b2")}
    experts = replace(inputs["experts"], w13=inputs["experts"].w13.repeat(4, 1, 1),
                      w2=inputs["experts"].w2.repeat(4, 1, 1))  # fmt: skip
    many = {**inputs, "ids": torch.where(inputs["ids"] < 0, -1, inputs["ids"] + 16).int(), "experts": experts,
            "lora": replace(inputs["lora"], **twice)}  # fmt: skip
    taken = take(case.site, many)
    definition = ops.load("moe_experts")
    statics = definition.static_values(case.site)
    assert taken.inputs["lora"].a13.shape[1] == len(taken.inputs["experts"].w13) == 8
    wanted, found = (definition.reference(*x.values(), **statics) for x in (many, taken.inputs))
    assert torch.equal(wanted, found)


def test_padding_has_no_adapter_and_is_not_forced():
    """Padded to a bucket, a token has adapter -1 and a row that is not forced."""
    operator = ops.load("moe_experts")
    (case,) = select(ids=["moe_experts/lora_one_token/float32"])
    made = padded(operator, case.inputs(), {"tokens": (4,)})
    assert made["lora"].adapters[1:].tolist() == [-1] * 3
    (case,) = select(ids=["route_topk/forced_one_token/float32"])
    made = padded(ops.load("route_topk"), case.inputs(), {"tokens": (4,)})
    assert made["forced_ids"][1:].eq(-1).all()


def test_the_shared_experts_activations_free_nobody_without_one():
    """Where a site has no shared expert, the format of its activations is no freedom."""
    declared, operator = {"shared_activation_format": "mxfp8"}, ops.load("moe_experts")
    for name, kept in (("hot_expert", {}), ("shared_hot", declared)):
        case = select(ids=[f"moe_experts/{name}"])[0]
        assert concerning(operator, case.site, case.inputs(), declared) == kept
