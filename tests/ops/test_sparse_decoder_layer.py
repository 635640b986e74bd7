"""sparse_decoder_layer: a layer whose parts are the definitions; transformers' layer stands in test_transformers."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from m3hal_conformance.case import make_site
from m3hal_conformance.harness import cloned
from m3hal_conformance.ranks import run_ranks
from m3hal_conformance.suite import select
from m3hal_conformance.suite.whole_layer import SMALL

from m3hal import ops
from m3hal.ops.sparse_decoder_layer import BETWEEN, compose, prepare
from m3hal.shape import MINIMAX_M3, ModelShape

SITE = make_site("sparse_layer", "float32", **{**SMALL, "shared_format": "float32"})
DEFINITION = ops.load("sparse_decoder_layer")


def bound(name):
    """A definition at the layer's site."""
    operator = ops.load(name)
    return partial(operator.reference, **operator.static_values(SITE))


def of_core(name):
    """An operator as a composition of core definitions, all the way down."""
    operator = ops.load(name)
    if not operator.covers:
        return bound(name)
    return operator.compose(**{part: of_core(part) for part in operator.covers}, **operator.static_values(SITE))


def outcome(run, inputs):
    """Outputs and caches of a call on caches of its own."""
    given = cloned(inputs)
    returned = run(*given.values())
    return [*returned, given["kv"].buf, given["index_cache"].buf]


def case(name, dtype="float32"):
    (found,) = [c for c in select(ids=[f"sparse_decoder_layer/{name}"]) if c.format == dtype]
    return found


@pytest.mark.parametrize("name", ["decode", "chunks", "no_token", "padded_only"])
def test_it_is_the_composition_of_core_definitions(name):
    """Bit for bit where every operator's dtype is fp32: outputs, residual and every byte of the caches."""
    inputs = case(name).inputs()
    mine, theirs = outcome(bound("sparse_decoder_layer"), inputs), outcome(of_core("sparse_decoder_layer"), inputs)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(mine, theirs, strict=True))


def test_nothing_is_rounded_between_the_parts():
    """In bf16 it is the layer of the same numbers in fp32, whose outputs are rounded; the composition is not."""
    inputs = case("decode", "bfloat16").inputs()
    wide = {**inputs, "x": inputs["x"].float(), "residual": inputs["residual"].float()}
    mine = outcome(bound("sparse_decoder_layer"), inputs)
    exact = outcome(bound("sparse_decoder_layer"), wide)
    assert torch.equal(mine[0], exact[0].bfloat16())
    assert torch.equal(mine[1], exact[1].bfloat16())
    assert not torch.equal(outcome(of_core("sparse_decoder_layer"), inputs)[0], mine[0])


def test_the_parts_roundings_are_no_freedoms_of_the_layer():
    """Every other freedom of its parts is one of the layer's too."""
    parts = {trait.name for part in DEFINITION.covers for trait in ops.load(part).traits}
    assert {trait.name for trait in DEFINITION.traits} == parts - set(BETWEEN)
    assert set(BETWEEN) <= parts


def test_the_shared_expert_is_added_once():
    """The output without it and its own output add up to the output; the routed scale leaves it alone."""
    inputs = case("decode").inputs()
    layer = inputs["layer"]
    whole, residual = bound("sparse_decoder_layer")(*cloned(inputs).values())
    without = {**inputs, "layer": replace(layer, experts=replace(layer.experts, shared=None))}
    routed, same = bound("sparse_decoder_layer")(*cloned(without).values())
    h = ops.load("rms_norm").reference(residual, layer.post_norm, eps=SITE.eps, weight_offset=SITE.weight_offset)
    w13, w2 = layer.experts.shared.w13[0], layer.experts.shared.w2[0]
    own = ops.load("swiglu_oai").reference(h @ w13.T, alpha=SITE.alpha, beta=SITE.beta, limit=SITE.limit) @ w2.T
    assert torch.equal(residual, same)
    torch.testing.assert_close(whole - routed, own, rtol=1e-4, atol=1e-5)


def test_a_group_of_one_is_none():
    """One rank's group changes no bit."""
    inputs = case("chunks").inputs()
    alone = outcome(bound("sparse_decoder_layer"), inputs)
    (grouped,) = run_ranks(1, lambda group: outcome(bound("sparse_decoder_layer"), {**inputs, "group": group}))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(alone, grouped, strict=True))


def test_the_composition_packs_its_experts_only():
    """Weights are packed as moe_experts packs them; nothing else of the layer changes."""
    layer = case("decode").inputs()["layer"]
    packed = prepare(lambda experts: ("packed", experts))(layer)
    assert packed.experts == ("packed", layer.experts)
    assert replace(packed, experts=layer.experts) == layer


def test_the_composition_uses_what_it_is_given():
    """Every part is the callable of a plan; the experts get this rank's ids, -1 where another has the expert."""
    inputs = case("decode").inputs()
    calls, parts = [], {}
    for name in DEFINITION.covers:
        run = bound(name)
        parts[name] = lambda *given, name=name, run=run: (calls.append((name, given)), run(*given))[1]
    compose(**parts, num_local_experts=4)(*cloned(inputs).values())
    assert [name for name, _ in calls] == [
        "allreduce_add_rms_norm", "qkv_norm_rope_insert", "select_blocks", "sparse_attention", "linear",
        "allreduce_add_rms_norm", "route_topk", "moe_experts",
    ]  # fmt: skip
    ids = dict(calls)["moe_experts"][2]
    assert {-1} < set(ids.flatten().tolist()) <= {-1, 0, 1, 2, 3}


def test_its_place_holds_what_both_of_its_places_hold():
    """A shape gives the site on demand and lists it nowhere by itself."""
    shape = ModelShape.from_config(
        MINIMAX_M3, dtype="bfloat16", page_size=128, max_tokens=64, max_seqs=8, max_context=4096, tensor_parallel=4
    )
    site, sites = shape.sparse_layer(), {site.kind: site for site in shape.sites()}
    assert "sparse_layer" not in sites
    attention = ("num_q_heads", "scale", "causal", "window_left", "top_k_blocks", "kv_format")
    experts = ("num_experts", "intermediate_size", "alpha", "routed_scale", "renormalize")
    for kind, names in (("sparse_attention", attention), ("moe", experts)):
        assert all(getattr(site, name) == getattr(sites[kind], name) for name in names)


#: all but those of several ranks, which share a router, and those without a token
SEVERAL = ("two_ranks", "no_token", "padded_only")
WATCHED = [c for c in select(operators=["sparse_decoder_layer"]) if not any(name in c.id for name in SEVERAL)]


@pytest.mark.parametrize("case", WATCHED[::3], ids=lambda c: c.id)
def test_no_selection_of_a_case_is_close(case):
    """Scores of blocks and of experts are apart by much more than a rounding of their inputs moves them."""
    seen = {}

    def watched(name):
        run = partial(ops.load(name).reference, **ops.load(name).static_values(case.site))
        return lambda *given: (seen.setdefault(name, []).append(given), run(*given))[1]

    run = compose(**{part: watched(part) for part in DEFINITION.covers}, num_local_experts=case.site.num_local_experts)
    inputs = cloned(case.inputs())
    run(*inputs.values())
    real = inputs["meta"].positions(len(inputs["x"])) >= 0
    for logits, bias in seen["route_topk"]:
        best = (logits.sigmoid() + bias)[real & logits.isfinite().all(-1)].sort(-1, descending=True).values
        k = case.site.top_k_experts
        assert (best[:, k - 1] - best[:, k]).min() > 0.05 if len(best) else True
    for index_q, cache, meta in seen["select_blocks"]:
        scores = ops.load("block_scores").reference(index_q, cache, meta, block_size=case.site.block_size)
        free = case.site.top_k_blocks - case.site.local_blocks - case.site.init_blocks
        for token, position in enumerate(meta.positions(len(index_q)).tolist()):
            end = position // case.site.block_size + 1 - case.site.local_blocks
            best = scores[token, :, case.site.init_blocks : max(end, 0)].sort(-1, descending=True).values
            if best.shape[-1] > free and best.isfinite().all():
                assert (best[:, free - 1] > 1.3 * best[:, free]).all()
