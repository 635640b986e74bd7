"""Experts whose products take block formats, against the definition that rounds activations to the same ones."""

from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, worst_row
from m3hal_triton import moe_scaled
from test_moe_experts import H, _bytes, _experts, _inputs, _run, _site, _tensors

from m3hal.dispatch import M3halError, Policy, plan
from m3hal.ops import ExpertWeights, load
from m3hal.shape import MINIMAX_M3, ModelShape

#: (weights, activations)
PAIRS = [("mxfp4", "mxfp8"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")]
BOUND = 6e-3
#: (weights, activations, whether NVFP4's blocks go into the matrix unit or the numbers that they stand for)
PATHS = [(*pair, scaled) for pair in PAIRS for scaled in ((False, True) if "nvfp4" in pair else (False,))]
SLOW = pytest.mark.slow


def _kernel(site, activation):
    return getattr(moe_scaled, f"{activation}_activations")(site)


def _defined(site, given, experts, **traits):
    """The definition in fp64, with what the products take rounded as the traits say."""
    op, (x, weights, ids) = load("moe_experts"), given
    return op.reference(x.double(), weights.double(), ids, experts, **op.static_values(site), traits=traits)


def _unit(scaled, monkeypatch):
    """A GPU whose matrix unit takes NVFP4's blocks, or one that does not."""
    if scaled and DEVICE != "cpu":
        pytest.skip("this GPU's matrix unit takes no NVFP4; the interpreter does")
    monkeypatch.setattr(moe_scaled, "takes_nvfp4", lambda: scaled)


@pytest.mark.parametrize(("format", "activation", "scaled"), PATHS)
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_every_format(format, activation, scaled, tokens, monkeypatch):
    """Absent pairs with NaN weights, experts without a token; what is declared is what is rounded."""
    _unit(scaled, monkeypatch)
    site, experts = _site("bfloat16", format, 40), _experts(format)
    kernel, given = _kernel(site, activation), _inputs(tokens, torch.bfloat16)
    out = _run(kernel, *given, kernel.prepare_weights(experts))
    assert worst_row(out, _defined(site, given, experts, activation_format=activation)) <= BOUND
    assert worst_row(out, _defined(site, given, experts)) > 2 * BOUND


@pytest.mark.parametrize(("format", "activation"), PAIRS)
@pytest.mark.parametrize(("hidden", "inner"), [(96, 32), (64, 416), (192, 160)])
def test_sizes_that_fill_no_tile(format, activation, hidden, inner):
    """Columns and features beyond the matrices are zeros, whatever memory holds."""
    site = _site("bfloat16", format, hidden_size=hidden, intermediate_size=inner)
    experts, given = _experts(format, hidden=hidden, inner=inner), _inputs(5, torch.bfloat16, hidden)
    kernel = _kernel(site, activation)
    out = _run(kernel, *given, kernel.prepare_weights(experts))
    assert worst_row(out, _defined(site, given, experts, activation_format=activation)) <= BOUND


@pytest.mark.parametrize(("format", "activation"), [PAIRS[0], *(pytest.param(*pair, marks=SLOW) for pair in PAIRS[1:])])
def test_many_pairs_are_sorted_by_many_programs(format, activation):
    """More pairs than one program sorts, and the widest tile; one expert holds most of them."""
    tokens = 300
    site = _site("bfloat16", format, tokens, hidden_size=64, intermediate_size=32)
    experts, (x, weights, ids) = _experts(format, hidden=64, inner=32), _inputs(tokens, torch.bfloat16, 64)
    ids[:, 0], weights[:, 0] = 2, 0.5
    kernel = _kernel(site, activation)
    out = _run(kernel, x, weights, ids, kernel.prepare_weights(experts))
    assert worst_row(out, _defined(site, (x, weights, ids), experts, activation_format=activation)) <= BOUND


@pytest.mark.parametrize("scaled", [False, True], ids=["by_bf16", "scaled"])
def test_global_scales_of_a_checkpoint(scaled, monkeypatch):
    """Tokens and hidden activations are divided by theirs before NVFP4, and multiplied afterwards."""
    _unit(scaled, monkeypatch)
    site, experts = _site("bfloat16", "nvfp4"), _experts("nvfp4")
    scales = (torch.tensor(number, device=DEVICE) for number in (0.013, 0.11))
    experts = replace(experts, **dict(zip(("x_scale", "hidden_scale"), scales, strict=True)))
    kernel, given = moe_scaled.nvfp4_activations(site), _inputs(9, torch.bfloat16)
    packed = kernel.prepare_weights(experts)
    out = _run(kernel, *given, packed)
    assert worst_row(out, _defined(site, given, experts, activation_format="nvfp4")) <= BOUND
    plain = replace(experts, x_scale=None, hidden_scale=None)
    assert worst_row(out, _defined(site, given, plain, activation_format="nvfp4")) > 2 * BOUND


@pytest.mark.parametrize(("format", "activation"), PAIRS)
@pytest.mark.parametrize("device", ["cuda:sm_90", "cuda:sm_100", "cuda:sm_103", "hip:gfx950"])
def test_offered_where_the_unit_takes_blocks(device, format, activation):
    """A plan that requires the trait finds one there, and elsewhere says that the device is why not."""
    policy = Policy.resolve(api={"backend": "triton", "require": [f"activation_format={activation}"]}, environ={})
    shape = ModelShape.from_config(
        MINIMAX_M3, dtype="bfloat16", page_size=128, max_tokens=64, max_seqs=8, max_context=4096, weight_format=format
    )
    engine = dict.fromkeys(("linear", "embedding", "lm_head", "all_reduce"), "vllm")
    if device == "cuda:sm_90" or (device, format) == ("hip:gfx950", "nvfp4"):
        with pytest.raises(M3halError, match=f"{activation}_activations: rejected at device"):
            plan(shape, device, policy, engine=engine)
    else:
        told = plan(shape, device, policy, engine=engine).explain("moe_experts")
        assert f"moe_experts at moe: triton {activation}_activations" in told


@pytest.mark.parametrize(("format", "activation"), PAIRS)
def test_packed_weights_come_back(format, activation):
    """Byte by byte; and after an update of two experts, those of the update."""
    experts, others, few = _experts(format), _experts(format, seed=5), slice(2, 4)
    kernel = _kernel(_site("bfloat16", format), activation)
    packed = kernel.prepare_weights(experts)
    assert _bytes(kernel.unpack(packed)) == _bytes(experts)
    kernel.update_weights(packed, 2, ExpertWeights(others.w13[few], others.w2[few]))
    old, new, now = (_tensors(e) for e in (experts, others, kernel.unpack(packed)))
    for before, given, after in zip(old, new, now, strict=True):
        assert after.tolist() == torch.cat([before[:2], given[2:4], before[4:]]).tolist()


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_one_bad_token(format):
    """A token of NaN stays alone with it."""
    site, experts = _site("bfloat16", format), _experts(format)
    kernel, (x, weights, ids) = moe_scaled.mxfp8_activations(site), _inputs(9, torch.bfloat16)
    packed = kernel.prepare_weights(experts)
    good = _run(kernel, x, weights, ids, packed)
    x[4] = torch.nan
    out = _run(kernel, x, weights, ids, packed)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(out[others], good[others])
    assert out[4].isnan().all()


def test_no_token():
    """An empty batch launches nothing."""
    kernel = moe_scaled.mxfp8_activations(_site("bfloat16", "mxfp4"))
    assert _run(kernel, *_inputs(0, torch.bfloat16), kernel.prepare_weights(_experts("mxfp4"))).shape == (0, H)


def test_adapters_are_refused():
    """What no plan lets through is not left out in silence either."""
    kernel = moe_scaled.mxfp8_activations(_site("bfloat16", "mxfp4"))
    with pytest.raises(ValueError, match="no adapters"):
        _run(kernel, *_inputs(1, torch.bfloat16), kernel.prepare_weights(_experts("mxfp4")), object())


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU: no graph to capture")
@pytest.mark.parametrize(("format", "activation"), PAIRS)
@pytest.mark.parametrize("tokens", [9, 300])
def test_graph_replayed_over_another_routing(format, activation, tokens):
    """Captured once, replayed with other tokens, ids and weights: what an eager run gives, bit by bit."""
    kernel = _kernel(_site("bfloat16", format, tokens), activation)
    packed, static = kernel.prepare_weights(_experts(format)), _inputs(tokens, torch.bfloat16)
    out = torch.empty_like(static[0])
    scratch = torch.empty(kernel.workspace_bytes, dtype=torch.uint8, device=DEVICE)
    kernel.run(*static, packed, out=out, workspace=scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(*static, packed, out=out, workspace=scratch)
    given = _inputs(tokens, torch.bfloat16, seed=2)
    for held, new in zip(static, given, strict=True):
        held.copy_(new)
    scratch.fill_(0xFF)
    graph.replay()
    assert torch.equal(out, _run(kernel, *given, packed))
