"""Routed and shared experts and their adapters, against the definition in fp64."""

import itertools
from dataclasses import replace

import pytest
import torch
import triton.language as tl
from attention_cases import DEVICE, poisoned, worst_row
from m3hal_triton import _moe_batch
from m3hal_triton import _moe_gemm as gemm
from m3hal_triton import _moe_tuning as tuning
from m3hal_triton import moe_experts as module
from m3hal_triton._moe_align import AT_ONCE
from m3hal_triton._moe_tuning import Tile, Tuning
from m3hal_triton._workspace import Memory
from m3hal_triton.moe_experts import batch_invariant, fp8_activations, moe_experts

from m3hal import formats
from m3hal.formats import QTensor, nvfp4, spec_of
from m3hal.ops import ExpertLoRA, ExpertWeights, load
from m3hal.shape import MINIMAX_M3, ModelShape

SHARED = [
    ("bfloat16", "bfloat16"),
    ("bfloat16", "nvfp4"),
    ("mxfp8", "bfloat16"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp4"),
]
FORMATS = ("float32", "bfloat16", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4")
BOUND = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
E, H, I = 6, 128, 96  # noqa: E741


def _site(dtype, format, tokens=32, **values):
    shape = ModelShape.from_config(
        MINIMAX_M3,
        dtype=dtype,
        page_size=16,
        max_tokens=tokens,
        max_seqs=8,
        max_context=512,
        weight_format=format,
    )
    site = next(site for site in shape.sites() if site.kind == "moe")
    small = {"hidden_size": H, "intermediate_size": I, "num_local_experts": E}
    return replace(site, **(small | values))


def _stored(x, format):
    if format in ("float32", "bfloat16"):
        return x.to(getattr(torch, format)).to(DEVICE)
    if format == "nvfp4":
        q = nvfp4.quantize(x, nvfp4.global_scale_of(x, own=1))
    else:
        q = formats.quantize(x, spec_of(format))
    held = [None if t is None else t.to(DEVICE) for t in (q.data, q.scale, q.global_scale)]
    return QTensor(held[0], q.spec, *held[1:])


def _experts(format, experts=E, hidden=H, inner=I, seed=0, shared=None):
    random = torch.Generator().manual_seed(seed)
    size = 2.0 ** torch.arange(experts)[:, None, None]
    w13 = torch.randn(experts, 2 * inner, hidden, generator=random) * 2 / hidden**0.5
    w2 = torch.randn(experts, hidden, inner, generator=random) / inner**0.5 * size
    return ExpertWeights(_stored(w13, format), _stored(w2, format), shared=shared)


def _inputs(tokens, dtype, hidden=H, experts=E, slots=4, seed=1):
    """Every third pair absent, its weight NaN; the last expert without a token."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=random).to(dtype)
    ids = torch.rand(tokens, experts - 1, generator=random).topk(slots, -1).indices.int()
    weights = torch.rand(tokens, slots, generator=random) + 0.1
    absent = torch.rand(tokens, slots, generator=random) < 0.3
    return [t.to(DEVICE) for t in (x, weights.masked_fill(absent, torch.nan), ids.masked_fill(absent, -1))]


def _double(value):
    if isinstance(value, ExpertWeights):
        shared = None if value.shared is None else _double(value.shared)
        return replace(value, w13=_double(value.w13), w2=_double(value.w2), shared=shared)
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _exact(site, x, weights, ids, experts, lora=None):
    op = load("moe_experts")
    if lora is not None:
        lora = ExpertLoRA(*(_double(getattr(lora, name)) for name in lora.__dataclass_fields__))
    given = (x.double(), weights.double(), ids, _double(experts))
    return op.reference(*given, *((lora,) if lora is not None else ()), **op.static_values(site))


def _run(kernel, x, weights, ids, packed, *lora):
    scratch = torch.full((kernel.workspace_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    return kernel.run(x, weights, ids, packed, *lora, out=poisoned(*x.shape, dtype=x.dtype), workspace=scratch)


def _dtype(format):
    return torch.float32 if format == "float32" else torch.bfloat16


def _name(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_every_format(format, tokens):
    """Absent pairs with NaN weights, experts without a token, scales of every row, group and expert."""
    dtype = _dtype(format)
    site, experts = _site(_name(dtype), format), _experts(format)
    kernel, given = moe_experts(site), _inputs(tokens, dtype)
    out = _run(kernel, *given, kernel.prepare_weights(experts))
    assert worst_row(out, _exact(site, *given, experts)) <= BOUND[dtype]


@pytest.mark.parametrize("format", FORMATS[2:])
def test_stored_weights_beside_fp32(format):
    """Products in IEEE fp32 of the very numbers that codes stand for."""
    site, experts = _site("float32", format), _experts(format)
    kernel, given = moe_experts(site), _inputs(5, torch.float32)
    out = _run(kernel, *given, kernel.prepare_weights(experts))
    assert worst_row(out, _exact(site, *given, experts)) <= BOUND[torch.float32]


@pytest.mark.parametrize("format", ["bfloat16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(("hidden", "inner"), [(96, 32), (64, 416), (192, 160)])
def test_sizes_that_fill_no_tile(format, hidden, inner):
    """Columns and features beyond the matrices are zeros, whatever memory holds."""
    site = _site("bfloat16", format, hidden_size=hidden, intermediate_size=inner)
    experts, given = _experts(format, hidden=hidden, inner=inner), _inputs(5, torch.bfloat16, hidden)
    kernel = moe_experts(site)
    out = _run(kernel, *given, kernel.prepare_weights(experts))
    assert worst_row(out, _exact(site, *given, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("tokens", [2, 40])
def test_matrices_in_pieces(format, tokens):
    """Rows and columns enough for pieces of both: the same numbers, and the same bytes again, also after an update."""
    sizes = {"hidden": 512, "inner": 256}
    site = _site("bfloat16", format, tokens, hidden_size=512, intermediate_size=256)
    experts, others = _experts(format, **sizes), _experts(format, **sizes, seed=5)
    kernel, given = moe_experts(site), _inputs(tokens, torch.bfloat16, 512)
    packed = kernel.prepare_weights(others)
    assert packed.w2.scale.ndim == 5
    kernel.update_weights(packed, 0, experts)
    assert _bytes(kernel.unpack(packed)) == _bytes(experts)
    out = _run(kernel, *given, packed)
    assert worst_row(out, _exact(site, *given, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_half_as_many_pairs_as_experts(format):
    """Four bits, fewer pairs than the tiles of a step up are for and more than find their items themselves."""
    site = _site("bfloat16", format, 5, hidden_size=512, intermediate_size=256, num_local_experts=40)
    experts, given = _experts(format, 40, 512, 256), _inputs(5, torch.bfloat16, 512, 40)
    kernel = moe_experts(site)
    assert kernel.run.choice.tuning(20).up != kernel.run.choice.tuning(40).up
    assert not kernel.run.choice.is_few(5)
    out = _run(kernel, *given, kernel.prepare_weights(experts))
    assert worst_row(out, _exact(site, *given, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("tokens", [300, 600])
@pytest.mark.parametrize("format", ["bfloat16", "fp8_e4m3"])
def test_many_pairs_are_sorted_by_many_programs(format, tokens):
    """By one kernel and by two; one expert holds most of the pairs."""
    assert (4 * tokens > AT_ONCE) == (tokens == 600)
    site = _site("bfloat16", format, tokens, hidden_size=64, intermediate_size=32)
    experts, (x, weights, ids) = _experts(format, hidden=64, inner=32), _inputs(tokens, torch.bfloat16, 64)
    ids[:, 0] = 2
    weights[:, 0] = 0.5
    kernel = moe_experts(site)
    out = _run(kernel, x, weights, ids, kernel.prepare_weights(experts))
    assert worst_row(out, _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("format", ["bfloat16", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_split_sums(format, tokens):
    """Few experts and a long K: parts of products beside one another in a tile, or by programs that others add up."""
    site = _site("bfloat16", format, hidden_size=1024, intermediate_size=512)
    experts, given = _experts(format, hidden=1024, inner=512), _inputs(tokens, torch.bfloat16, 1024)
    tile = Tile(128, 128, programs=4)
    kernel = module._kernel(site, ((float("inf"), Tuning(16, tile, tile)),))
    packed, choice = kernel.prepare_weights(experts), kernel.run.choice
    assert choice.is_few(tokens) == (tokens == 1)
    assert min(choice.parts(4, tile, packed.w13), *choice.splits(4 * tokens)) > 1
    out = _run(kernel, *given, packed)
    assert worst_row(out, _exact(site, *given, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("format", ["bfloat16", "mxfp8"])
@pytest.mark.parametrize("tokens", [4, 16])
@pytest.mark.parametrize("chosen", ["one", "one and few", "none"])
def test_few_tokens_of_one_expert(format, tokens, chosen):
    """More pairs of an expert than an item has, a token with one expert in several slots, and no pair at all."""
    site, experts = _site("bfloat16", format, num_local_experts=16), _experts(format, 16)
    x, weights, ids = _inputs(tokens, torch.bfloat16, experts=16)
    absent = ids < 0
    if chosen != "one and few":
        ids = torch.full_like(ids, 3)
    ids[tokens // 4 :] = 3
    weights = weights.nan_to_num(0.3)
    if chosen != "one":
        ids = ids.masked_fill(absent, -1)
    if chosen == "none":
        ids = torch.full_like(ids, -1)
    kernel = moe_experts(site)
    wide = poisoned(tokens, 2 * H, dtype=torch.bfloat16)
    scratch = torch.full((kernel.workspace_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    strided = [torch.stack([t, t], -1).flatten(1)[:, ::2] for t in (weights, ids)]
    assert kernel.run.choice.is_few(tokens) == (tokens == 4)
    packed = kernel.prepare_weights(experts)
    out = kernel.run(x, *strided, packed, out=wide[:, : 2 * H : 2], workspace=scratch)
    assert worst_row(out, _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("format", ["bfloat16", "mxfp8", "nvfp4"])
def test_a_narrow_product_beside_the_tile(format):
    """Experts with fewer tokens than a tile, with a few more, and with several tiles."""
    tile = Tile(128, 128)
    ladder = ((float("inf"), Tuning(16, tile, tile, extra=16)),)
    site = _site("bfloat16", format, 40)
    experts, (x, weights, ids) = _experts(format), _inputs(40, torch.bfloat16)
    ids[:, 0], weights[:, 0] = 1, 0.7
    ids[:20, 1], weights[:20, 1] = 0, 0.2
    kernel = module._kernel(site, ladder)
    out = _run(kernel, x, weights, ids, kernel.prepare_weights(experts))
    assert worst_row(out, _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("format", ["bfloat16", "mxfp8"])
@pytest.mark.parametrize(("tuning", "counts"), [((128, 16), (140, 127, 60, 30)), ((32, 0), (48, 32, 16, 3))])
def test_items_of_every_width(format, tuning, counts):
    """Experts with a quarter of a tile's tokens, with a half, with nearly all, and with a few more."""
    tile, tokens = Tile(128, 64), counts[0]
    ladder = ((float("inf"), Tuning(tuning[0], tile, tile, extra=tuning[1])),)
    site = _site("bfloat16", format, tokens, top_k_experts=4)
    experts, (x, weights, _) = _experts(format), _inputs(tokens, torch.bfloat16)
    ids = torch.full((tokens, 4), -1, dtype=torch.int32, device=DEVICE)
    for expert, count in enumerate(counts):
        ids[:count, expert] = expert
    weights = weights.nan_to_num(0.3)
    kernel = module._kernel(site, ladder)
    out = _run(kernel, x, weights, ids, kernel.prepare_weights(experts))
    assert worst_row(out, _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize("tokens", [9, 30])
def test_programs_of_w2_wait_for_their_item(tokens, monkeypatch):
    """Each program of w13 is counted for its item, once, and no program of w2 asks for more."""
    if DEVICE == "cpu":  # launches one after the other, so what is asked is what is there
        monkeypatch.setattr(_moe_batch, "programmatic", lambda device: True)
        monkeypatch.setattr(tl.extra.cuda, "gdc_wait", lambda: None)
        monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda: None)
        asked = itertools.count()
        monkeypatch.setattr(gemm, "_seen", lambda counter: tl.load(counter) if next(asked) < 1000 else counter / 0)
    site, experts = _site("bfloat16", "mxfp8", tokens), _experts("mxfp8")
    kernel, (x, weights, ids) = moe_experts(site), _inputs(tokens, torch.bfloat16)
    scratch = torch.full((kernel.workspace_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
    packed = kernel.prepare_weights(experts)
    out = kernel.run(x, weights, ids, packed, workspace=scratch)
    memory = Memory(kernel.run.choice.room(tokens), scratch)
    found = memory.take("ready", torch.int32, -1)[: memory.take("numbers", torch.int32, -1)[-1]]
    rows = kernel.run.choice.tuning(4 * tokens).up.rows
    assert found.tolist() == [-(-packed.w13.rows // rows)] * len(found)
    assert worst_row(out, _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize(("format", "shared", "tokens"), [*((*both, 19) for both in SHARED), ("mxfp8", "nvfp4", 110)])
def test_shared_expert(format, shared, tokens):
    """Every token's, with weight 1, in a format and of a size of its own; also where all routed pairs are absent."""
    site = _site("bfloat16", format, tokens, shared_intermediate_size=160, shared_format=shared)
    experts = _experts(format, shared=_experts(shared, 1, inner=160, seed=9))
    x, weights, ids = _inputs(tokens, torch.bfloat16)
    ids[3] = -1
    kernel = moe_experts(site)
    packed = kernel.prepare_weights(experts)
    out = _run(kernel, x, weights, ids, packed)
    assert worst_row(out, _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]


@pytest.mark.parametrize(("tokens", "joins"), [(1, True), (5, True), (70, False), (450, True)])
@pytest.mark.parametrize("format", ["bfloat16", "mxfp8", "nvfp4"])
def test_shared_expert_in_the_same_launches(format, tokens, joins):
    """One that is like the routed ones is one more of them, for few tokens and for many."""
    hidden, inner = 64, 32
    site = _site("bfloat16", format, tokens, hidden_size=hidden, intermediate_size=inner)
    site = replace(site, shared_intermediate_size=inner, shared_format=format)
    own = {"hidden": hidden, "inner": inner}
    experts = _experts(format, **own, shared=_experts(format, 1, **own, seed=9))
    x, weights, ids = _inputs(tokens, torch.bfloat16, hidden)
    ids[tokens // 2] = -1
    kernel = moe_experts(site)
    assert kernel.run.choice.joins(tokens) == joins
    packed = kernel.prepare_weights(experts)
    out = _run(kernel, x, weights, ids, packed)
    assert worst_row(out, _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]


def test_update_of_a_joined_shared_expert():
    """Routed and shared experts lie side by side, and each is written and read as its own."""
    own = {"hidden": 64, "inner": 32}
    old, new = (_experts("nvfp4", **own, seed=s, shared=_experts("nvfp4", 1, **own, seed=s + 9)) for s in (0, 5))
    site = _site("bfloat16", "nvfp4", hidden_size=64, intermediate_size=32)
    kernel = moe_experts(replace(site, shared_intermediate_size=32, shared_format="nvfp4"))
    packed = kernel.prepare_weights(old)
    assert packed.joined
    for given in (old, new):
        kernel.update_weights(packed, 0, given)
        back = kernel.unpack(packed)
        assert _bytes(back) == _bytes(given)
        assert _bytes(back.shared) == _bytes(given.shared)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "mxfp8", "nvfp4"])
def test_adapters(format):
    """Before the activation and after the second product; tokens without an adapter, experts absent."""
    dtype = _dtype(format)
    site, experts, rank = _site(_name(dtype), format, lora_rank=5), _experts(format), 5
    random = torch.Generator().manual_seed(3)
    a13, b13, a2, b2 = (
        (torch.randn(2, E, *size, generator=random) / size[1] ** 0.5).to(dtype).to(DEVICE)
        for size in ((rank, H), (2 * I, rank), (rank, I), (H, rank))
    )
    scales = torch.tensor([[0.5, 77], [2.0, 77]], device=DEVICE)[:, 0]  # as an engine's tables hold them: every other
    adapters = torch.tensor([[0, 7], [1, 7], [-1, 7], [0, 7], [1, 7], [1, 7], [-3, 7]], dtype=torch.int32)
    adapters = adapters.to(DEVICE)[:, 0]
    lora, given = ExpertLoRA(a13, b13, a2, b2, scales, adapters), _inputs(7, dtype)
    kernel = moe_experts(site)
    packed = kernel.prepare_weights(experts)
    out = _run(kernel, *given, packed, lora)
    assert worst_row(out, _exact(site, *given, experts, lora)) <= BOUND[dtype]
    plain = _run(kernel, *given, packed)
    assert worst_row(plain, _exact(site, *given, experts)) <= BOUND[dtype]


@pytest.mark.parametrize("tokens", [1, 40])
def test_rounded_activations(tokens):
    """Tokens and hidden activations in FP8, as the definition rounds them."""
    site, experts = _site("bfloat16", "fp8_e4m3", 40), _experts("fp8_e4m3")
    kernel, given = fp8_activations(site), _inputs(tokens, torch.bfloat16)
    out = _run(kernel, *given, kernel.prepare_weights(experts))
    op, traits = load("moe_experts"), {"activation_format": "fp8_e4m3", "double_rounding": "bfloat16"}
    exact = op.reference(given[0].double(), *given[1:], experts, **op.static_values(site), traits=traits)
    assert worst_row(out, exact) <= 1.2e-2


@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_come_back(format):
    """Byte by byte; and after an update of two experts, those of the update."""
    dtype = _dtype(format)
    site, experts, others = _site(_name(dtype), format), _experts(format), _experts(format, seed=5)
    kernel = moe_experts(site)
    packed = kernel.prepare_weights(experts)
    assert _bytes(kernel.unpack(packed)) == _bytes(experts)
    few = slice(2, 4)
    kernel.update_weights(packed, 2, ExpertWeights(others.w13[few], others.w2[few]))
    mixed = [
        torch.cat([old[:2], new[2:4], old[4:]])
        for old, new in zip(_tensors(experts), _tensors(others), strict=True)
        if old.ndim
    ]
    assert [t.tolist() for t in _tensors(kernel.unpack(packed))] == [t.tolist() for t in mixed]


def _tensors(experts):
    found = []
    for weight in (experts.w13, experts.w2):
        parts = (weight.data, weight.scale, weight.global_scale) if isinstance(weight, QTensor) else (weight,)
        found += [part for part in parts if part is not None]
    return found


def _bytes(experts):
    return [t.contiguous().view(torch.uint8).tolist() for t in _tensors(experts)]


def test_no_token():
    """An empty batch launches nothing."""
    site = _site("bfloat16", "bfloat16")
    kernel = moe_experts(site)
    assert _run(kernel, *_inputs(0, torch.bfloat16), kernel.prepare_weights(_experts("bfloat16"))).shape == (0, H)


@pytest.mark.parametrize("format", ["bfloat16", "mxfp8"])
def test_batch_invariant(format):
    """A token has the same bits alone and in any batch."""
    site, experts = _site("bfloat16", format), _experts(format)
    kernel, (x, weights, ids) = batch_invariant(site), _inputs(21, torch.bfloat16)
    packed = kernel.prepare_weights(experts)
    together = _run(kernel, x, weights, ids, packed)
    for token in (0, 8, 20):
        rows = slice(token, token + 1)
        assert torch.equal(_run(kernel, x[rows], weights[rows], ids[rows], packed), together[rows])


@pytest.mark.parametrize("format", ["bfloat16", "mxfp8"])
def test_one_bad_token(format):
    """A token of NaN stays alone with it, and so does an infinite one."""
    site, experts = _site("bfloat16", format), _experts(format)
    kernel, (x, weights, ids) = moe_experts(site), _inputs(9, torch.bfloat16)
    packed = kernel.prepare_weights(experts)
    good = _run(kernel, x, weights, ids, packed)
    x[4], x[6, 3] = torch.nan, torch.inf
    out = _run(kernel, x, weights, ids, packed)
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(out[others], good[others])
    assert out[4].isnan().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU: no graph to capture")
@pytest.mark.parametrize("format", ["bfloat16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("tokens", [1, 9, 400])
def test_graph_replayed_over_other_routings(format, tokens):
    """Captured once, replayed with other ids, all of them absent too: what an eager run gives, bit by bit."""
    site, experts = _site("bfloat16", format, tokens), _experts(format)
    kernel = moe_experts(site)
    packed = kernel.prepare_weights(experts)
    static = _inputs(tokens, torch.bfloat16)
    out = torch.empty_like(static[0])
    scratch = torch.empty(kernel.workspace_bytes, dtype=torch.uint8, device=DEVICE)
    kernel.run(*static, packed, out=out, workspace=scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(*static, packed, out=out, workspace=scratch)
    others = [_inputs(tokens, torch.bfloat16, seed=seed) for seed in (2, 3)]
    others[1][2].fill_(-1)
    for given in others:
        for held, new in zip(static, given, strict=True):
            held.copy_(new)
        scratch.fill_(0xFF)
        graph.replay()
        assert torch.equal(out, _run(kernel, *given, packed))


@pytest.mark.parametrize("is_nvidia", [True, False])
def test_ladders_cover_all_batches(is_nvidia):
    """Every number of pairs finds a tuning."""
    for format in FORMATS[1:]:
        site = _site("bfloat16", format)
        for rounds in (False, True):
            ladder = tuning.ladder_of(site, rounds=rounds, is_nvidia=is_nvidia)
            assert ladder[-1][0] == float("inf")
            assert [most for most, _ in ladder] == sorted(most for most, _ in ladder)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shared", [0, 1])
def test_workspace_for_every_batch(format, shared):
    """No number of tokens needs more than ``workspace_bytes``, also where just below it sums were kept in fp32."""
    dtype = _name(_dtype(format))
    site = _site(dtype, format)
    site = replace(
        site, shared_format=format if shared else "", shared_intermediate_size=shared * site.intermediate_size
    )
    for experts, slots, most in ((1, 1, 97), (8, 2, 385), (8, 4, 193)):  # a tuning ends one token earlier
        sized = replace(site, num_local_experts=experts, top_k_experts=slots, max_tokens=most)
        kernel = moe_experts(sized)
        rooms = (kernel.run.choice.room(tokens, kernel.run.choice.joins(tokens)).total for tokens in range(1, most + 1))
        assert max(rooms) <= kernel.workspace_bytes


@pytest.mark.parametrize("tokens", [1, 40])
def test_scales_of_a_checkpoint(tokens):
    """Tokens and hidden activations in FP8 over the scales that a checkpoint gives, not over their own."""
    site, experts = _site("bfloat16", "fp8_e4m3", 40), _experts("fp8_e4m3")
    scales = {"x_scale": torch.tensor(0.9, device=DEVICE), "hidden_scale": torch.tensor(0.3, device=DEVICE)}
    experts = replace(experts, **scales)
    kernel, given = fp8_activations(site), _inputs(tokens, torch.bfloat16)
    out = _run(kernel, *given, kernel.prepare_weights(experts))
    op, traits = load("moe_experts"), {"activation_format": "fp8_e4m3", "double_rounding": "bfloat16"}
    exact = op.reference(given[0].double(), *given[1:], experts, **op.static_values(site), traits=traits)
    assert worst_row(out, exact) <= 1.2e-2


def test_scales_are_copies():
    """An update writes into no tensor of the caller's, and a scale that wasn't there can't come."""
    kernel, experts = moe_experts(_site("bfloat16", "fp8_e4m3")), _experts("fp8_e4m3")
    given = replace(experts, x_scale=torch.tensor(0.5, device=DEVICE))
    packed = kernel.prepare_weights(given)
    before = kernel.unpack(packed)
    kernel.update_weights(packed, 0, replace(experts, x_scale=torch.tensor(2.0, device=DEVICE)))
    assert (given.x_scale, before.x_scale, kernel.unpack(packed).x_scale) == (0.5, 0.5, 2.0)
    with pytest.raises(ValueError, match="without scales"):
        kernel.update_weights(kernel.prepare_weights(experts), 0, given)
