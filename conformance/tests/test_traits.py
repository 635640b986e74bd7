"""Declared freedoms are judged by the definition that takes them: the declared one passes, another one does not."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from m3hal_conformance.oracle import BITWISE, UncalibratedError, concerning
from m3hal_conformance.runner import Runner
from m3hal_conformance.suite import select
from m3hal_conformance.tolerance import CAP, LOOSE_CAP, bounds_for, calibration, cap, is_unbounded

from m3hal import ops
from m3hal.dispatch import Impl, Limit, Manifest, register, unregister
from m3hal.layouts import PAGE_MAPS
from m3hal.reference import with_out


@contextmanager
def backend(operator, declared, computed, monkeypatch):
    """A runner that meets a backend which computes with some traits and declares others."""
    definition = ops.load(operator)

    def factory(site):
        statics = definition.static_values(site)
        return with_out(lambda *inputs: definition.reference(*inputs, **statics, traits=computed))

    monkeypatch.setitem(sys.modules, "m3hal_with_traits", SimpleNamespace(factory=factory, __spec__=None))
    layouts = PAGE_MAPS if definition.group == "cache" else ()
    limits = tuple(Limit(attribute) for attribute in definition.optional)  # mentioned, and anything goes
    impl = Impl("m3hal_with_traits:factory", limits, layouts=layouts, traits=declared, memory="self")
    register(Manifest("with-traits", "m3hal tests", ">=1,<2", ("cpu",), {operator: (impl,)}, priority=-1))
    try:
        yield Runner("with-traits", "cpu")
    finally:
        unregister("with-traits")


DECLARED = [
    ("linear", "k_416/bfloat16", {"activation_format": "mxfp8"}, {"activation_format": "mxfp4"}),
    ("linear", "nvfp4_k_416/bfloat16", {"activation_format": "nvfp4", "nvfp4_quantizer": "token_global"}, {}),
    ("linear", "k_416/float32", {"activation_format": "fp8_e4m3"}, {"activation_format": "fp8_e4m3_240"}),
    ("moe_experts", "mxfp8_experts/bfloat16", {"activation_format": "mxfp8"}, {"activation_format": "nvfp4"}),
    ("moe_experts", "nvfp4_experts/bfloat16", {"activation_format": "nvfp4"}, {"activation_format": "mxfp4"}),
    (
        "moe_experts",
        "nvfp4_experts/bfloat16",
        {"activation_format": "nvfp4", "double_rounding": "bfloat16"},
        {"activation_format": "nvfp4"},
    ),
    ("moe_experts", "nvfp4_scaled/bfloat16", {"activation_format": "nvfp4", "combine_dtype": "bfloat16"}, {}),
    (
        "moe_experts",
        "shared_mxfp8_beside_nvfp4/bfloat16",
        {"activation_format": "nvfp4", "shared_activation_format": "mxfp8"},
        {"activation_format": "nvfp4"},
    ),
    (
        "moe_experts",
        "shared_scaled/float32",
        {"activation_format": "nvfp4", "shared_activation_format": "nvfp4"},
        {"shared_activation_format": "nvfp4"},
    ),
    (
        "moe_experts",
        "fp8_e4m3_experts/bfloat16",
        {"activation_format": "fp8_e4m3", "mma_accum": "float22"},
        {"mma_accum": "float22"},
    ),
    ("moe_experts", "lora_mxfp8_experts/bfloat16", {"activation_format": "mxfp8"}, {"combine_dtype": "bfloat16"}),
    ("sparse_attention", "decode/bfloat16", {"q_dtype": "e4m3"}, {"p_dtype": "e4m3x448"}),
    ("sparse_attention", "nvfp4_decode/bfloat16-planar", {"kv_dequant_round": "e4m3"}, {"q_dtype": "e4m3"}),
    (
        "paged_attention",
        "nvfp4_decode/bfloat16-msa_slot",
        {"kv_dequant_round": "e4m3", "q_dtype": "e4m3", "p_dtype": "e4m3x448"},
        {"kv_dequant_round": "e4m3_shift3", "q_dtype": "e4m3", "p_dtype": "e4m3x448"},
    ),
    ("block_scores", "nvfp4_needles/bfloat16-planar", {"kv_dequant_round": "e4m3"}, {"q_dtype": "e4m3"}),
    ("kv_write", "fp8_e4m3_page_boundaries/bfloat16", {"kv_scale_used": "no"}, {}),
    ("kv_write", "nvfp4_odd_values/float32-planar", {"nvfp4_quantizer": "reciprocal"}, {}),
    ("kv_write", "fp8_e4m3_page_boundaries/float32", {"double_rounding": "bfloat16"}, {}),
    ("kv_write", "mxfp4_index/bfloat16-planar", {"mx_scale_rule": "floor"}, {"mx_scale_rule": "ceil"}),
    (
        "qk_norm_rope_insert",
        "nvfp4_mxfp4_page_boundaries/bfloat16-planar",
        {"mx_scale_rule": "floor"},
        {"mx_scale_rule": "ceil"},
    ),
    ("quantize", "to_mxfp8/float32", {"mx_scale_rule": "floor"}, {"mx_scale_rule": "even"}),
    ("qk_norm_rope_insert", "nvfp4_page_boundaries/bfloat16-planar", {"nvfp4_quantizer": "reciprocal"}, {}),
    ("qk_norm_rope_insert", "fp8_e4m3_page_boundaries/bfloat16", {"kv_scale_used": "no"}, {}),
    ("allreduce_add_rms_norm", "ranks_3/bfloat16", {"reduce_dtype": "bfloat16"}, {"add_norm_round": "bfloat16"}),
    (
        "allreduce_add_rms_norm",
        "cancelling/bfloat16",
        {"reduce_dtype": "bfloat16_stepwise"},
        {"reduce_dtype": "bfloat16"},
    ),
    ("mega_moe", "uneven_routed/float32", {"reduce_dtype": "bfloat16"}, {}),
    ("mega_moe", "uneven_routed/bfloat16", {"activation_format": "mxfp8"}, {"activation_format": "mxfp4"}),
    (
        "mega_moe",
        "ranks_2/bfloat16",
        {"activation_format": "nvfp4", "nvfp4_quantizer": "token_global", "shared_activation_format": "mxfp8"},
        {"activation_format": "nvfp4", "nvfp4_quantizer": "token_global"},
    ),
    ("draft_block_sample", "greedy/bfloat16", {"logits_round": "bfloat16"}, {"logits_round": "bias_bfloat16"}),
    ("draft_block_sample", "sampled/bfloat16", {"logits_round": "bias_bfloat16"}, {}),
]
IDS = [f"{operator}-{case.partition('/')[0]}-{'-'.join(traits.values())}" for operator, case, traits, _ in DECLARED]


@pytest.mark.parametrize(("operator", "case", "traits", "_"), DECLARED, ids=IDS)
def test_what_is_declared_passes(operator, case, traits, _, monkeypatch):
    """The definition with the traits is within the bounds of an implementation that declares them."""
    with backend(operator, traits, traits, monkeypatch) as runner:
        result = runner.run_case(select(ids=[f"{operator}/{case}"])[0])
    assert result.status == "pass", result.reason or result.sentence


@pytest.mark.parametrize(("operator", "case", "traits", "other"), DECLARED, ids=IDS)
def test_what_is_not_declared_fails(operator, case, traits, other, monkeypatch):
    """Traits that are taken and not declared fail, also beside others that are."""
    with backend(operator, other, traits, monkeypatch) as runner:
        result = runner.run_case(select(ids=[f"{operator}/{case}"])[0])
    assert result.status == "fail", result.reason or "it passes"


def test_traits_of_storage_need_their_storage():
    """On plain caches a storage trait frees nobody; where the format is stored it counts."""
    declared = {"kv_dequant_round": "e4m3", "p_dtype": "bfloat16"}
    operator = ops.load("sparse_attention")
    for case, kept in (
        ("sparse_attention/decode", {"p_dtype": "bfloat16"}),
        ("sparse_attention/nvfp4_decode", declared),
    ):
        one = select(ids=[case])[0]
        assert concerning(operator, one.site, one.inputs(), declared) == kept


def test_widths_that_fill_no_group_are_unsupported(monkeypatch):
    """A width of one can't be quantised in groups; the reason says so, and it is no pass."""
    near = {"combine_dtype": "bfloat16"}  # not exact, so that the declared traits are asked
    with backend("moe_experts", {"activation_format": "mxfp8"}, near, monkeypatch) as runner:
        result = runner.run_case(select(ids=["moe_experts/published_halves/float32"])[0])
    assert (result.status, "fill groups" in result.reason) == ("unsupported", True)


def test_uncalibrated_combinations_cost_their_sum():
    """Traits that nobody calibrated together are bounded by what each costs, added up; unknown ones are not bounded."""
    operator = ops.load("sparse_attention")

    def bound(**traits):
        return bounds_for(operator, "bfloat16", "blocks", traits, "exact")("out", "row")

    alone = [bound(p_dtype="bfloat16"), bound(mma_accum="float16")]
    both, none = bound(p_dtype="bfloat16", mma_accum="float16"), bound()
    assert both == pytest.approx(sum(alone) - none, rel=0.05)
    with pytest.raises(UncalibratedError, match="calibrate"):
        bounds_for(operator, "bfloat16", "no_such_class", {"p_dtype": "bfloat16"}, "exact")("out", "row")


def test_costs_are_capped():
    """Nothing that is declared lets zeros pass, and only what the definition takes is bounded loosely by exact."""
    assert cap("row", {"p_dtype": "e4m3x448"}, "declared") == cap("row", {}, "exact") == CAP["row"]
    assert cap("row", {"p_dtype": "e4m3x448"}, "exact") == LOOSE_CAP["row"]
    assert max(CAP["row"], LOOSE_CAP["row"]) < 1  # zeros are off by 1
    bounds = bounds_for(ops.load("linear"), "bfloat16", "plain", {"activation_format": "nvfp4"}, "exact")
    assert CAP["row"] < bounds("out", "row") <= LOOSE_CAP["row"]
    assert is_unbounded("rounding", {"kv_scale_used": "no"}, "exact")
    assert not is_unbounded("rounding", {"kv_scale_used": "no"}, "declared")


#: roundings of what scores and routers see: inside a whole layer they move choices, so no bound holds there, and the
#: suite calls an implementation that declares them unsupported
MOVE_CHOICES = {
    *("activation_format", "shared_activation_format", "mx_scale_rule", "nvfp4_quantizer"),
    *("q_dtype", "kv_dequant_round"),
}


def _values():
    """Every freedom of the vocabulary, with what it needs to mean anything."""
    for name in ops.NAMES:
        for trait in ops.load(name).traits:
            for value in trait.values[1:]:
                # a promise; and what the definition refuses, as a cache has one global scale
                if trait.name != "batch_invariant" and (value != "token_global" or name in ("linear", "moe_experts")):
                    yield name, {trait.name: value}


@pytest.mark.parametrize(("name", "traits"), list(_values()), ids=str)
def test_every_freedom_has_a_bound(name, traits):
    """Where a case leaves room for a declared freedom, some case of the operator can be judged with it."""
    operator = ops.load(name)
    needs = {"mx_scale_rule": {"activation_format": "mxfp8"}, "nvfp4_quantizer": {"activation_format": "nvfp4"}}
    needs["double_rounding"] = needs["mx_scale_rule"]
    layer = name == "sparse_decoder_layer"
    if not layer and any(trait.name == "activation_format" for trait in operator.traits):
        traits = {**next((more for trait, more in needs.items() if trait in traits), {}), **traits}
    if operator.name in BITWISE or "topk_key_bits" in traits:
        return  # judged by bits, or by the score of what is chosen
    entries = [key.split("+")[0].split("/") for key in calibration() if key.startswith(f"{name}/")]
    unbounded = layer and bool(MOVE_CHOICES & set(traits))
    assert any(_is_bounded(operator, entry, traits) for entry in entries) != unbounded


def _is_bounded(operator, entry, traits):
    _, output, format, input_class = entry
    metric = {"R": "row", "U1": "ulp", "S": "regret"}[operator.numeric.kind]
    try:
        bounds_for(operator, format, input_class, traits, "declared")(output, metric)
    except UncalibratedError:
        return False
    return True
