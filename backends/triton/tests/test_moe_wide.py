"""The products that stay on Hopper: which calls they take and, on the GPU, what they come to.

Gluon is not interpreted, so where there is no Hopper GPU their code is compiled only (machine_cases.py).
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_cases import DEVICE, worst_row
from m3hal_triton import _moe_wide as wide
from m3hal_triton._launch import is_hopper
from m3hal_triton._moe_weights import Matrix
from m3hal_triton.moe_experts import fp8_activations, moe_experts
from test_moe_experts import BOUND, _exact, _experts, _inputs, _run, _site

ON_HOPPER = pytest.mark.skipif(
    DEVICE == "cpu" or not is_hopper(torch.device(DEVICE)), reason="no Hopper GPU: Gluon is not interpreted"
)
HIDDEN, INNER, EXPERTS = 256, 384, 6
#: tokens of each expert: two items and each width at both of its ends; overfull ones, and one that nobody chose
COUNTS = [(577, 289, 288, 257, 256, 193), (192, 161, 160, 129, 128, 65), (64, 300, 1, 0, 500, 900)]


def _given(counts, dtype=torch.bfloat16):
    """Each expert's first tokens have it in a slot of their own; whoever is in no expert has ids of -1."""
    tokens = max(max(counts), 145 * EXPERTS)
    x, weights, _ = _inputs(tokens, dtype, HIDDEN, EXPERTS + 1, EXPERTS)
    ids = torch.full((tokens, EXPERTS), -1, dtype=torch.int32, device=DEVICE)
    for expert, count in enumerate(counts):
        ids[:count, expert] = expert
    return x, weights.nan_to_num(0.3).masked_fill(ids < 0, torch.nan), ids


def _kernel(factory, format, tokens, **values):
    site = _site(
        "bfloat16", format, tokens, hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS,
        num_experts=EXPERTS, top_k_experts=EXPERTS, **values,
    )  # fmt: skip
    return site, factory(site), _experts(format, EXPERTS, HIDDEN, INNER)


@pytest.fixture
def taken(monkeypatch):
    """How many products were these."""
    found, launch = [], wide._launch
    monkeypatch.setattr(wide, "_launch", lambda *given: found.append(given) or launch(*given))
    return found


@ON_HOPPER
@pytest.mark.parametrize("counts", COUNTS)
def test_items_of_every_width(counts, taken):
    """Within the bound of the definition, with every width of an item and a poisoned workspace; the same bits twice."""
    given = _given(counts)
    site, kernel, experts = _kernel(moe_experts, "bfloat16", len(given[0]))
    packed = kernel.prepare_weights(experts)
    out = _run(kernel, *given, packed)
    assert len(taken) == 2
    assert worst_row(out, _exact(site, *given, experts)) <= BOUND[torch.bfloat16]
    assert torch.equal(out, _run(kernel, *given, packed))


@ON_HOPPER
@pytest.mark.parametrize("counts", COUNTS)
def test_fp8_by_fp8(counts, taken, monkeypatch):
    """Codes on both sides, with a scale for each row: what the other kernel gives but for roundings of hidden codes."""
    given = _given(counts)
    _, kernel, experts = _kernel(fp8_activations, "fp8_e4m3", len(given[0]))
    packed = kernel.prepare_weights(experts)
    out = _run(kernel, *given, packed)
    assert len(taken) == 2
    monkeypatch.setattr(wide, "takes", lambda *given: False)
    assert worst_row(out, _run(kernel, *given, packed).double()) <= 1.5e-2
    assert len(taken) == 2


@ON_HOPPER
def test_rows_apart(taken):
    """Activations that are columns of a wider tensor are read where they lie."""
    x, weights, ids = _given(COUNTS[0])
    _, kernel, experts = _kernel(moe_experts, "bfloat16", len(x))
    packed, apart = kernel.prepare_weights(experts), torch.full((len(x), HIDDEN + 64), torch.nan).to(x)
    apart[:, 32 : HIDDEN + 32] = x
    out = _run(kernel, apart[:, 32 : HIDDEN + 32], weights, ids, packed)
    assert len(taken) == 2
    assert torch.equal(out, _run(kernel, x, weights, ids, packed))


@ON_HOPPER
def test_rows_that_no_copy_takes(taken):
    """Activations in rows 8 numbers more than a multiple of 16 apart: w13's product is another's, w2's is this."""
    x, weights, ids = _given(COUNTS[0])
    site, kernel, experts = _kernel(moe_experts, "bfloat16", len(x))
    apart = torch.full((len(x), HIDDEN + 8), torch.nan).to(x)
    apart[:, :HIDDEN] = x
    out = _run(kernel, apart[:, :HIDDEN], weights, ids, kernel.prepare_weights(experts))
    assert len(taken) == 1
    assert worst_row(out, _exact(site, x, weights, ids, experts)) <= BOUND[torch.bfloat16]


@ON_HOPPER
def test_numbers_that_are_none_stay_where_they_are(taken):
    """NaN and infinity in a row of weights reach that output alone, of the tokens that chose the expert."""
    given = _given(COUNTS[0])
    _, kernel, experts = _kernel(moe_experts, "bfloat16", len(given[0]))
    clean = _run(kernel, *given, kernel.prepare_weights(experts))
    experts.w2[1, 5, 7], experts.w2[1, 9, 3] = torch.nan, torch.inf
    out = _run(kernel, *given, kernel.prepare_weights(experts))
    assert len(taken) == 4
    chose = (given[2] == 1).any(-1)
    assert out[chose, 5].isnan().all()
    assert not out[chose, 9].isfinite().any()
    out[chose, 5], out[chose, 9] = clean[chose, 5], clean[chose, 9]
    assert worst_row(out, clean.double()) <= 1e-3  # powers of two of the other outputs may differ


@ON_HOPPER
def test_shared_expert_in_the_same_launches(taken):
    """A shared expert whose rows follow those of the routed ones: tiles of it lie beyond their tensor."""
    x, weights, ids = _given(COUNTS[0])
    site, kernel, experts = _kernel(
        moe_experts, "bfloat16", len(x), shared_intermediate_size=INNER, shared_format="bfloat16"
    )
    own = _experts("bfloat16", 1, HIDDEN, INNER, seed=3)
    packed = kernel.prepare_weights(replace(experts, shared=own))
    assert packed.joined
    out = _run(kernel, x, weights, ids, packed)
    assert len(taken) == 2
    assert worst_row(out, _exact(site, x, weights, ids, replace(experts, shared=own))) <= BOUND[torch.bfloat16]


@ON_HOPPER
def test_graph_replayed_over_other_routings():
    """Captured once, replayed with other ids, none at all too: what an eager run gives, bit by bit."""
    static = _given(COUNTS[0])
    _, kernel, experts = _kernel(moe_experts, "bfloat16", len(static[0]))
    packed, out = kernel.prepare_weights(experts), torch.empty_like(static[0])
    scratch = torch.empty(kernel.workspace_bytes, dtype=torch.uint8, device=DEVICE)
    kernel.run(*static, packed, out=out, workspace=scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.run(*static, packed, out=out, workspace=scratch)
    for counts in (COUNTS[1], COUNTS[2], (0,) * EXPERTS):
        given = _given(counts)
        for held, new in zip(static, given, strict=True):
            held.copy_(new[: len(held)])
        scratch.fill_(0xFF)
        graph.replay()
        assert torch.equal(out, _run(kernel, *static, packed))


def _asked(inputs, codes, **other):
    """Whether a product would be one of these."""
    matrix = Matrix(codes, None, None, None, None, None, None, inputs.shape[1])
    tuning = SimpleNamespace(tokens=256, extra=32)
    batch = {"is_hopper": True, "lift": False, "items": 1, "powers": 1, "hidden": inputs, "tuning": tuning}
    return wide.takes(SimpleNamespace(**(batch | other)), matrix, inputs)


def test_which_products_are_taken():
    """bf16 or E4M3 on both sides, whole tiles and aligned rows, many tokens, Hopper; no others."""
    codes, inputs = torch.empty(2, 256, 128, dtype=torch.bfloat16), torch.empty(300, 128, dtype=torch.bfloat16)
    assert _asked(inputs, codes)
    assert _asked(inputs.to(torch.float8_e4m3fn), codes.to(torch.uint8))
    assert not _asked(inputs, codes, is_hopper=False)
    assert not _asked(inputs, codes, powers=None)
    assert not _asked(inputs, codes, items=None)
    assert not _asked(inputs, codes, lift=True)
    assert not _asked(inputs, codes, tuning=SimpleNamespace(tokens=64, extra=0))
    assert not _asked(inputs, codes[:, :192])
    assert not _asked(inputs[:, :96], codes[..., :96])
    assert not _asked(inputs, codes.to(torch.uint8))
    assert not _asked(inputs.float(), codes.float())
    assert not _asked(inputs.T.contiguous().T, codes)
    assert not _asked(torch.empty(300, 136, dtype=torch.bfloat16)[:, :128], codes)
    assert not _asked(torch.empty(300, 132, dtype=torch.bfloat16)[:, :128], codes)
    assert not _asked(torch.empty(301 * 128, dtype=torch.bfloat16)[1:][: 300 * 128].view(300, 128), codes)
    assert not _asked(torch.empty(2**24, 128, dtype=torch.bfloat16, device="meta"), codes)
