"""Experts of few tokens whose warps each load and multiply weights of their own, against the definition in fp64."""

from dataclasses import replace

import pytest
import torch
from attention_cases import DEVICE, worst_row
from m3hal_triton import _moe_tuning as tuning
from m3hal_triton import moe_experts as module
from m3hal_triton._moe_tuning import BY_WARPS, Warps
from test_moe_experts import BOUND, _exact, _experts, _inputs, _run, _site

H, I = 512, 256  # noqa: E741
SIZES = {"hidden": H, "inner": I}
FOUR_BIT = ["nvfp4", "mxfp4"]


def _kernel(monkeypatch, format, tokens, up=(64, 4, 4), down=(64, 2, 2), **values):
    """(rows, warps, warps along a row) of both products."""
    monkeypatch.setattr(module, "by_warps", lambda site, is_nvidia: (Warps(*up), Warps(*down)))
    site = _site("bfloat16", format, tokens, hidden_size=H, intermediate_size=I, **values)
    kernel = module.moe_experts(site)
    assert 4 * tokens <= BY_WARPS
    return site, kernel


@pytest.mark.parametrize("format", FOUR_BIT)
@pytest.mark.parametrize(("tokens", "up", "down"), [(2, (64, 4, 4), (64, 2, 2)), (3, (128, 4, 2), (32, 1, 1))])
def test_products(format, tokens, up, down, monkeypatch):
    """Absent pairs with NaN weights, scales of every kind; warps beside one another in rows and along them."""
    site, kernel = _kernel(monkeypatch, format, tokens, up, down)
    experts, given = _experts(format, **SIZES), _inputs(tokens, torch.bfloat16, H)
    out = _run(kernel, *given, kernel.prepare_weights(experts))
    assert worst_row(out, _exact(site, *given, experts)) <= BOUND[torch.bfloat16] / 2


def test_tokens_with_gaps(monkeypatch):
    """Tokens that start anywhere, and whose numbers are apart."""
    site, kernel = _kernel(monkeypatch, "nvfp4", 2)
    experts, (x, weights, ids) = _experts("nvfp4", **SIZES), _inputs(2, torch.bfloat16, 2 * H + 1)
    packed = kernel.prepare_weights(experts)
    for given in (x[:, 1 : H + 1], x[:, 1::2]):
        out = _run(kernel, given, weights, ids, packed)
        assert worst_row(out, _exact(site, given, weights, ids, experts)) <= BOUND[torch.bfloat16] / 2


def test_one_bad_token(monkeypatch):
    """A token of NaN stays alone with it; one without an expert, and a row of zeros, are zeros."""
    _, kernel = _kernel(monkeypatch, "nvfp4", 3)
    packed = kernel.prepare_weights(_experts("nvfp4", **SIZES))
    x, weights, ids = _inputs(3, torch.bfloat16, H)
    ids[1], weights[1] = torch.arange(4), 0.5
    good = _run(kernel, x, weights, ids, packed)
    x[1] = torch.nan
    out = _run(kernel, x, weights, ids, packed)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], good[[0, 2]])
    x[1] = 0.0
    ids[0] = -1
    assert not _run(kernel, x, weights, ids, packed)[:2].any()


@pytest.mark.parametrize("size", [2.0**-13, 2.0**100])
def test_tokens_beyond_fp16(size, monkeypatch):
    """Activations are brought into fp16's range by a power of two of their row, and sums back."""
    site, kernel = _kernel(monkeypatch, "mxfp4", 1)
    experts, (x, weights, ids) = _experts("mxfp4", **SIZES), _inputs(1, torch.bfloat16, H)
    ids[:], weights[:], x = torch.arange(4), 0.5, x * size
    out = _run(kernel, x, weights, ids, kernel.prepare_weights(experts))
    assert worst_row(out, _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]


def test_shared_expert(monkeypatch):
    """One more that every token chose is no matter of warps; also where all routed pairs are absent."""
    site, kernel = _kernel(monkeypatch, "nvfp4", 2, shared_intermediate_size=I, shared_format="nvfp4")
    experts = _experts("nvfp4", **SIZES, shared=_experts("nvfp4", 1, **SIZES, seed=9))
    x, weights, ids = _inputs(2, torch.bfloat16, H)
    ids[1] = -1
    out = _run(kernel, x, weights, ids, kernel.prepare_weights(experts))
    assert worst_row(out, _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize(("hidden", "inner", "taken"), [(512, 256, True), (512, 288, False), (576, 256, False)])
def test_sizes(hidden, inner, taken):
    """Matrices that lie in pieces of 256 columns are multiplied so, by warps that each have rows of whole steps."""
    site = _site("bfloat16", "nvfp4", hidden_size=hidden, intermediate_size=inner)
    tiles = tuning.by_warps(site, is_nvidia=True)
    assert (tiles is not None) == taken
    for tile, size in zip(tiles or (), (hidden, inner), strict=False):
        assert size // 128 % tile.along == 0
        assert tile.rows * tile.along // tile.warps % 16 == 0
    for other in (replace(site, lora_rank=8), replace(site, weight_format="mxfp8"), replace(site, dtype="float32")):
        assert tuning.by_warps(other, is_nvidia=True) is None


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU: no graph to capture")
def test_graph_replayed_over_other_routings(monkeypatch):
    """Captured once, replayed with other ids, all of them absent too: what an eager run gives, bit by bit."""
    _, kernel = _kernel(monkeypatch, "nvfp4", 2)
    packed = kernel.prepare_weights(_experts("nvfp4", **SIZES))
    static = _inputs(2, torch.bfloat16, H)
    out = torch.empty_like(static[0])
    scratch = torch.empty(kernel.workspace_bytes, dtype=torch.uint8, device=DEVICE)
    kernel.run(*static, packed, out=out, workspace=scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(*static, packed, out=out, workspace=scratch)
    others = [_inputs(2, torch.bfloat16, H, seed=seed) for seed in (2, 3)]
    others[1][2].fill_(-1)
    for given in others:
        for held, new in zip(static, given, strict=True):
            held.copy_(new)
        scratch.fill_(0xFF)
        graph.replay()
        assert torch.equal(out, _run(kernel, *given, packed))
